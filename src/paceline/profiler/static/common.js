"use strict";
// Shared by all parts of the page: the theme, one tooltip, and the formatting of figures.

const $ = (selector, within = document) => within.querySelector(selector);
const data = (id) => JSON.parse($(`#${id}`)?.textContent ?? "null");

// Style sheets do not apply to a canvas: it asks for the theme's colors, and is redrawn when the theme changes.
const painters = [];
const probe = document.body.appendChild(document.createElement("i"));
probe.hidden = true;
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
function theme() {
  return document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
}
function themed() {
  const button = $("#theme");
  button.textContent = theme() === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", `Switch to the ${button.textContent.toLowerCase()} theme`);
  painters.forEach((paint) => paint());
}
$("#theme").onclick = () => {
  document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
  themed();
};
dark.addEventListener("change", themed);

const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;
function showTip(said, x, y) {
  tip.hidden = !said;
  if (!said) return;
  tip.textContent = said;
  const { width, height } = tip.getBoundingClientRect();
  const below = y + 16 + height < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - width - 4))}px`;
  tip.style.top = `${below ? y + 16 : Math.max(4, y - height - 10)}px`;
}
document.addEventListener("pointermove", (event) => {
  const over = event.target.closest?.("[data-tip], .own-tip");
  if (!over) return showTip("");
  if (over.dataset.tip) showTip(over.dataset.tip, event.clientX, event.clientY);
});
document.addEventListener("scroll", () => showTip(""), { passive: true, capture: true });

// Call back when an element's width has changed; in the next frame, because drawing may change the layout again.
function onWidth(element, paint) {
  let width = element.clientWidth;
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    paint();
  })).observe(element);
}

function ms(value) {
  const size = Math.abs(value);
  return `${value.toFixed(size >= 100 ? 0 : size >= 1 ? 1 : size > 0 ? 2 : 0)} ms`;
}
function nbytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${size.toFixed(size >= 10 || unit === 0 ? 0 : 1)} ${units[unit]}`;
}

// Who waits for whom: all cells of a shade are one path, so find the cell from the pointer's position.
const waits = data("waits-data"), heat = $(".heat");
if (waits && heat) {
  heat.addEventListener("pointermove", (event) => {
    const box = heat.getBoundingClientRect(), scale = Number(heat.dataset.width) / box.width;
    const place = (at) => Math.floor((at * scale - Number(heat.dataset.gutter)) / Number(heat.dataset.cell));
    const row = place(event.clientY - box.top), column = place(event.clientX - box.left);
    const value = waits[row]?.[column];
    const said = value === undefined || row === column ? ""
      : `rank ${row} waits ${ms(value)} per step for rank ${column}`;
    showTip(said, event.clientX, event.clientY);
  });
}
