"use strict";
// Mouse and touch on the timeline: dragging selects what to zoom into; dragging with Shift or one finger moves; two
// fingers, or Ctrl and the wheel, zoom. The wheel alone scrolls the page, as usual.

function pointers(view) {
  const canvas = view.canvas;
  const down = new Map();  // pointers on the canvas: id -> x
  const place = (event) => event.clientX - canvas.getBoundingClientRect().left;

  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey || event.metaKey) view.zoom(Math.exp(event.deltaY * 0.002), view.drawing.time(place(event)));
    else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) view.pan(sideways / 1000);
    else return;
    event.preventDefault();
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    down.set(event.pointerId, place(event));
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
    const moves = event.shiftKey || event.pointerType === "touch";
    view.drag = down.size === 1 ? { kind: moves ? "move" : "select", x: place(event), now: place(event) } : null;
  });

  canvas.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId), now = place(event), drag = view.drag;
    if (before === undefined) return hover(event);
    if (down.size === 2) {
      const [other] = [...down].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
      const factor = Math.abs(before - other) / Math.max(8, Math.abs(now - other));
      view.zoom(Math.min(2, Math.max(0.5, factor)), view.drawing.time((now + other) / 2));
    } else if (drag?.kind === "move") {
      const by = view.drawing.time(before) - view.drawing.time(now);
      view.show(view.from + by, view.to + by);
    } else if (drag) {
      drag.now = now;
      view.draw();
    }
    down.set(event.pointerId, now);
  });

  function up(event) {
    const drag = view.drag;
    down.delete(event.pointerId);
    if (!drag) return;
    view.drag = null;
    const [left, right] = [drag.x, drag.now].sort((one, other) => one - other);
    if (drag.kind === "move" || right - left < 5) return view.draw();
    const { drawing } = view;
    view.show(drawing.time(Math.max(left, drawing.gutter)), drawing.time(Math.max(right, drawing.gutter + 1)));
  }
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => view.hover(null));
  canvas.addEventListener("dblclick", () => view.whole());

  function hover(event) {
    const found = view.drawing.find(event);
    view.hover(found?.bucket ?? null);
    showTip(found?.text ?? "", event.clientX, event.clientY);
  }
}
