"use strict";
// The timeline of a step: which part is shown, and how keys, buttons, mouse and touch change that. Times are in ms.

const SHORTEST_MS = 0.005;

class StepTimeline {
  // State: `from` and `to`, the stretch that is shown; `spoken`, the number of the box read out last;
  // `hovered`, the bucket under the pointer; `drag`, what a pressed pointer has done so far, or null.
  constructor(root, step) {
    this.root = root;
    this.step = step;
    this.canvas = $(".lanes", root);
    this.drawing = new Drawing($(".axis", root), this.canvas, step.ranks);
    this.rows = step.ranks.map((_, rank) => rankRows(step, rank));
    this.choice = $("select", root);
    Object.assign(this, { from: 0, to: step.end, spoken: -1, hovered: null, drag: null });
    const actions = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.whole(), Home: () => this.whole(), ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
      n: () => this.speak(1), p: () => this.speak(-1) };
    this.canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || !(event.key in actions)) return;
      event.preventDefault();
      actions[event.key]();
    });
    for (const button of root.querySelectorAll("button[data-do]")) button.onclick = () => actions[button.dataset.do]();
    if (this.choice) this.choice.onchange = () => this.draw();
    onWidth(this.canvas.parentElement, () => this.draw());
    painters.push(() => this.draw());
    this.whole();
  }

  show(start, end) {
    const span = Math.min(this.step.end, Math.max(SHORTEST_MS, end - start));
    this.from = Math.max(0, Math.min(start, this.step.end - span));
    this.to = this.from + span;
    this.canvas.dataset.from = this.from;
    this.canvas.dataset.to = this.to;
    $(".range", this.root).textContent = `${ms(this.from)} to ${ms(this.to)} of ${ms(this.step.end)}`;
    this.draw();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    const span = Math.min(this.step.end, Math.max(SHORTEST_MS, (this.to - this.from) * factor));
    const part = (at - this.from) / (this.to - this.from);
    this.show(at - part * span, at + (1 - part) * span);
  }

  pan(part) {
    const by = part * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  whole() { this.show(0, this.step.end); }

  draw() {
    const shown = this.choice?.value === "notable" ? this.step.notable.map((rank) => this.rows[rank]) : this.rows;
    this.drawing.draw(shown, this.from, this.to, this.step.stragglers, this.hovered);
    if (this.drag?.kind === "select") this.drawing.selecting(this.drag.x, this.drag.now);
  }

  hover(bucket) {
    if (bucket === this.hovered) return;
    this.hovered = bucket;
    this.draw();
  }

  // Read out the next or previous box, and scroll it into view.
  speak(by) {
    const known = this.drawing.boxes.length;
    this.spoken = this.spoken < 0 && by < 0 ? known - 1 : (this.spoken + by + known) % known;
    let one = this.drawing.boxes[this.spoken];
    if (one.start < this.from || one.end > this.to) {
      this.show(Math.min(one.start, this.from), Math.max(one.end, this.to));
    }
    one = this.drawing.boxes[this.spoken];
    const scroller = this.canvas.parentElement;
    if (one.top < scroller.scrollTop || one.bottom + AXIS > scroller.scrollTop + scroller.clientHeight) {
      scroller.scrollTop = one.top - AXIS;
    }
    $(".spoken", this.root).textContent = one.text;
  }
}
