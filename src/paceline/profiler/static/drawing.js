"use strict";
// Draws a stretch of the timeline on a canvas, and remembers where each box is, for the pointer and keys.

const KINDS = { "data wait": "data", forward: "forward", backward: "backward", launch: "communication",
  control: "communication", wait: "communication", "bucket wait": "communication", reduce: "communication",
  collective: "communication", "outer step": "communication", optimizer: "optimizer", checkpoint: "checkpoint",
  "garbage collection": "collector" };
const SHADES = [...new Set(Object.values(KINDS)), "other", "bubble", "bubble-2", "ink", "pale", "line", "mark"];
const AXIS = 26, GAP = 12, ROOMY = 8, FONT = 'system-ui, "DejaVu Sans", sans-serif';

class Drawing {
  constructor(axis, canvas, names) {
    Object.assign(this, { axis, canvas, names, boxes: [], width: 0 });
  }

  get gutter() { return this.width < 600 ? 56 : 84; }
  x(at) { return this.gutter + (at - this.from) / (this.to - this.from) * (this.width - this.gutter); }
  time(px) { return this.from + (px - this.gutter) / (this.width - this.gutter) * (this.to - this.from); }

  // Draw the rows of some ranks from `from` to `to`; `hovered` is the number of a bucket to highlight on all ranks.
  draw(rows, from, to, stragglers, hovered) {
    Object.assign(this, { from, to, hovered, boxes: [], width: this.canvas.parentElement.clientWidth - 16 });
    this.roomy = rows.length <= ROOMY;
    const lanes = Math.max(1, ...rows.map((row) => row.lanes)), room = this.roomy ? 120 : 50;
    this.high = { phase: this.roomy ? 22 : 12, inner: this.roomy ? 10 : 5,
      bucket: Math.max(3, Math.min(this.roomy ? 13 : 6, Math.floor(room / lanes) - 1)) };
    this.ink = Object.fromEntries(SHADES.map((name) => [name, colour(name)]));
    const heights = rows.map((row) => this.below(row) + row.lanes * (this.high.bucket + 1) + GAP);
    this.pen = this.sized(this.canvas, heights.reduce((sum, one) => sum + one, 0));
    this.ruler();
    let top = GAP / 2;
    rows.forEach((row, index) => {
      this.group(row, top, stragglers.includes(this.names[row.rank]));
      top += heights[index];
      if (index < rows.length - 1) this.tinted(0.5, () => this.fill(this.ink.line, 0, top - GAP / 2, this.width, 1));
    });
  }

  below(row) { return this.high.phase + (row.depths - 1) * (this.high.inner + 1) + 3; }

  sized(canvas, height) {
    const scale = devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(this.width * scale);
    canvas.height = Math.round(height * scale);
    pen.scale(scale, scale);
    pen.font = `12px ${FONT}`;
    pen.textBaseline = "middle";
    return pen;
  }

  tinted(alpha, paint) {
    this.pen.globalAlpha = alpha;
    paint();
    this.pen.globalAlpha = 1;
  }

  fill(shade, x, y, width, height) {
    this.pen.fillStyle = shade;
    this.pen.fillRect(x, y, width, height);
  }

  ruler() {
    const label = this.sized(this.axis, AXIS), span = this.to - this.from;
    const rough = span / Math.max(2, (this.width - this.gutter) / 110), power = 10 ** Math.floor(Math.log10(rough));
    const tick = power * [1, 2, 5, 10].find((one) => one * power >= rough * 0.999);
    const digits = Math.max(0, -Math.floor(Math.log10(tick) + 1e-9));
    label.fillStyle = this.ink.pale;
    label.textAlign = "center";
    for (let number = Math.ceil(this.from / tick - 1e-9); number * tick <= this.to + tick * 1e-9; number += 1) {
      const at = this.x(number * tick), text = `${(number * tick).toFixed(digits)} ms`;
      label.fillText(text, Math.min(at, this.width - label.measureText(text).width / 2 - 1), AXIS / 2);
      this.tinted(0.4, () => this.fill(this.ink.line, at, 0, 1, this.canvas.clientHeight));
    }
  }

  group(row, top, slow) {
    const { pen, high } = this, name = `rank ${this.names[row.rank]}`;
    pen.textAlign = "left";
    pen.fillStyle = slow ? this.ink.mark : this.ink.ink;
    pen.fillText(name, 0, top + high.phase / 2 + 1);
    if (slow && this.roomy) pen.fillText("slow", 0, top + high.phase / 2 + 16);
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, this.width - this.gutter, this.canvas.clientHeight);
    pen.clip();
    for (const one of row.slices) this.slice(one, name, top, row.late);
    for (const trip of row.trips) this.trip(trip, row, top + this.below(row) + trip.lane * (high.bucket + 1));
    pen.restore();
  }

  slice(one, name, top, late) {
    const { high } = this, said = one.bucket === null ? one.label : `${one.label} ${one.bucket}`;
    const y = one.depth ? top + high.phase + 1 + (one.depth - 1) * (high.inner + 1) : top;
    const height = one.depth ? high.inner : high.phase, shade = this.ink[KINDS[one.label] ?? "other"];
    this.tinted(one.depth ? 0.75 : 1, () => this.stretch(shade, one.start, one.end, y, height, 1));
    if (one.label === "wait" || one.label === "bucket wait") this.late(late, one, y, height);
    const whole = one.end - one.start, own = one.own < whole - 0.001 ? ` (${ms(one.own)} without what is inside it)` : "";
    const text = `${name}: ${said}, ${ms(whole)}${own}, from ${ms(one.start)}`;
    this.keep(one.start, one.end, y, height, text, null);
    if (!one.depth && this.roomy) this.caption(said, one.start, one.end, y + height / 2 + 1);
  }

  // The parts of a wait that are a bubble.
  late(parts, wait, y, height) {
    for (const one of parts) {
      const inside = one.start >= wait.start && one.end <= wait.end;
      if (inside) this.stretch(this.striped(), one.start, one.end, y, height, 1);
    }
  }

  // The stripes of a bubble, the same as in the bars.
  striped() {
    const tile = document.createElement("canvas"), pen = tile.getContext("2d");
    tile.width = tile.height = 8;
    pen.fillStyle = this.ink.bubble;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = this.ink["bubble-2"];
    pen.lineWidth = 3;
    for (const at of [-4, 4, 12]) {
      pen.moveTo(at - 6, 10);
      pen.lineTo(at + 6, -2);
    }
    pen.stroke();
    return this.pen.createPattern(tile, "repeat");
  }

  trip(trip, row, y) {
    const height = this.high.bucket;
    for (const [start, end, shade] of [[trip.start, trip.last, "bubble"], [trip.last, trip.end, "communication"]]) {
      for (const [from, to, hidden] of cut(start, end, row.backward)) {
        this.tinted(hidden ? 0.42 : 1, () => this.stretch(this.ink[shade], from, to, y, height, 0));
      }
    }
    if (!trip.known) this.stretch(this.ink.communication, trip.start, trip.start, y, height, 2);
    this.keep(trip.start, trip.end, y, height, this.said(trip, row), trip.bucket);
    if (this.hovered === trip.bucket) {
      this.pen.strokeStyle = this.ink.ink;
      this.pen.lineWidth = 1.5;
      this.pen.strokeRect(this.x(trip.start), y, Math.max(2, this.x(trip.end) - this.x(trip.start)), height);
    }
  }

  said(trip, row) {
    const waited = trip.last - trip.start, end = trip.known ? `finished at ${ms(trip.end)}` : "its end is unknown";
    const parts = [`launched at ${ms(trip.start)}, ${end}`];
    if (waited > 0.001) parts.push(`waited ${ms(waited)} for rank ${this.names[trip.slowest]}, the last to launch it`);
    if (trip.known) parts.push(`${ms(Math.max(0, trip.exposed))} not hidden under backward`);
    return `rank ${this.names[row.rank]}: bucket ${trip.bucket}, ${nbytes(trip.nbytes)}: ${parts.join("; ")}`;
  }

  stretch(shade, start, end, y, height, least) {
    const left = this.x(start), width = Math.max(least, this.x(end) - left);
    if (left > this.width || left + width < this.gutter) return;
    this.fill(shade, left, y, width > 4 && least ? width - 1 : width, height);  // leaves a line of background between neighbors
  }

  keep(start, end, y, height, text, bucket) {
    const left = this.x(start);
    const right = Math.max(left + 2, this.x(end));
    this.boxes.push({ left, right, top: y, bottom: y + height, text, start, end, bucket });
  }

  caption(text, start, end, y) {
    const left = Math.max(this.x(start), this.gutter), right = Math.min(this.x(end), this.width);
    if (right - left < this.pen.measureText(text).width + 8) return;
    this.pen.fillStyle = "#10141a";
    this.pen.fillText(text, left + 4, y);
  }

  // Shade the selection, from one position to another.
  selecting(one, other) {
    const left = Math.min(one, other), height = this.canvas.clientHeight;
    this.tinted(0.18, () => this.fill(this.ink.mark, left, 0, Math.abs(one - other), height));
  }

  find(event) {
    const frame = this.canvas.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
    return this.boxes.findLast((one) => x >= one.left - 1 && x <= one.right + 1 && y >= one.top && y <= one.bottom);
  }
}
