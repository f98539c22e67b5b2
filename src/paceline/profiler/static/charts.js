"use strict";
// The chart of the steps of every rank, drawn by uPlot.

const HUES = ["#3d85d9", "#e08a1e", "#2f9e8f", "#c25ad1", "#d6524a", "#8a9a2b", "#7a6ee0", "#a8744f"];
const MOST_SINGLE = HUES.length;  // with more ranks: the range of all, their median, and one rank of choice

function axes(x, y) {
  const grid = { stroke: colour("grid"), width: 1 }, font = "12px system-ui, sans-serif";
  const one = (label, size) => ({ label, size, stroke: colour("pale"), font, labelFont: font, labelSize: 20, grid,
    ticks: grid });
  return [one(x, 34), one(y, 58)];
}

// A chart that fills the width of its container, and is recreated when the theme or the data changes.
function chart(place, make) {
  let plot = null;
  const height = () => (innerWidth < 600 ? 260 : 320);
  function paint() {
    plot?.destroy();
    const { options, values } = make();
    plot = new uPlot({ width: place.clientWidth, height: height(), ...options }, values, place);
    const canvas = $("canvas", place);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", place.dataset.label);
  }
  onWidth(place, () => plot.setSize({ width: place.clientWidth, height: height() }));
  painters.push(paint);
  paint();
  return paint;
}

function middle(values) {
  const there = values.filter((one) => one !== null).sort((one, other) => one - other);
  return there.length ? (there[(there.length - 1) >> 1] + there[there.length >> 1]) / 2 : null;
}

const shown = (plot, value) => (value === null || value === undefined ? "–" : ms(value));
const extreme = (choose) => (values) => {
  const there = values.filter((one) => one !== null);
  return there.length ? choose(...there) : null;
};

function stepSeries(rows, ranks, chosen) {
  const dots = { paths: () => null, value: shown };
  if (ranks.length <= MOST_SINGLE) {
    return [ranks.map((rank, index) => ({ ...dots, label: `rank ${rank}`, stroke: HUES[index],
      points: { show: true, size: 5, fill: `${HUES[index]}b0`, width: 0 } })), ranks.map((_, index) => rows[index])];
  }
  const across = (take) => rows[0].map((_, at) => take(rows.map((row) => row[at])));
  const line = (label, name, width, more = {}) => ({ label, stroke: colour(name), width, points: { show: false },
    value: shown, spanGaps: true, ...more });
  const series = [line("slowest rank", "edge", 1), line("fastest rank", "edge", 1), line("median", "accent", 1.5)];
  const values = [across(extreme(Math.max)), across(extreme(Math.min)), across(middle)];
  if (chosen >= 0) {
    series.push({ ...dots, label: `rank ${ranks[chosen]}`, stroke: HUES[1],
      points: { show: true, size: 4, fill: HUES[1], width: 0 } });
    values.push(rows[chosen]);
  }
  return [series, values, [{ series: [1, 2], fill: colour("band") }]];
}

function stepChart(record) {
  const root = $("#steps"), place = $(".plot", root), metric = $("[name=metric]", root), rank = $("[name=rank]", root);
  const again = chart(place, () => {
    const rows = record.metrics[metric.value];
    const [series, values, bands] = stepSeries(rows, record.ranks, Number(rank?.value ?? -1));
    const whole = (plot, value) => (value === null ? "–" : String(value));
    const scales = { x: { time: false }, y: { range: (plot, low, high) => [0, (high || 1) * 1.08] } };
    return { values: [record.steps, ...values], options: { axes: axes("step", "ms"), bands: bands ?? [], scales,
      series: [{ label: "step", value: whole }, ...series], cursor: { points: { size: 8 } } } };
  });
  metric.onchange = again;
  if (rank) rank.onchange = again;
}

const record = data("steps-data"), step = data("timeline-data");
if (record && $("#steps .plot")) stepChart(record);
if (step && $("#timeline .lanes")) pointers(new StepTimeline($("#timeline"), step));
themed();
