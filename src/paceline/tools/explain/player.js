"use strict";
// One player for each section. State is `at`, the number of the frame that is shown, and the timer while it plays.
// A step forward first animates the messages over the current frame, then shows the next frame.
const FLIGHT_MS = 700, PAUSE_MS = 900;
const still = window.matchMedia("(prefers-reduced-motion: reduce)");

function player(section) {
  const [frames, moving] = [".frame", ".moving"].map((kind) => [...section.querySelectorAll(".stage " + kind)]);
  const [said, what] = section.querySelectorAll(".said > *");
  const [first, back, play, next] = section.querySelectorAll("button"), slider = section.querySelector("input");
  const last = frames.length - 1;
  let at = 0, timer = null, flying = null;

  function show(number) {
    clearTimeout(flying);
    flying = null;
    at = Math.max(0, Math.min(last, number));
    frames.forEach((frame, index) => frame.classList.toggle("shown", index === at));
    moving.forEach((group) => group.classList.remove("shown"));
    said.textContent = frames[at].dataset.title;
    what.textContent = frames[at].dataset.caption;
    slider.value = at;
    slider.setAttribute("aria-valuetext", frames[at].dataset.title);
    first.disabled = back.disabled = at === 0;
    next.disabled = at === last;
    section.dataset.at = at;
  }

  function forward() {
    if (flying !== null) return show(at + 1);  // pressed again during the animation: finish at once
    if (at === last) return;
    if (still.matches || !moving[at + 1].childElementCount) return show(at + 1);
    moving[at + 1].classList.add("shown");
    said.textContent = frames[at + 1].dataset.title;
    what.textContent = frames[at + 1].dataset.caption;
    flying = setTimeout(() => show(at + 1), FLIGHT_MS);
  }

  function run() {
    if (at === last) return stop();
    forward();
    timer = setTimeout(run, (flying === null ? 0 : FLIGHT_MS) + PAUSE_MS);
  }

  function stop() {
    clearTimeout(timer);
    timer = null;
    play.textContent = "Play";
    section.dataset.playing = "no";
  }

  function toggle() {
    if (timer !== null) return stop();
    if (at === last) show(0);
    play.textContent = "Pause";
    section.dataset.playing = "yes";
    run();
  }

  const actions = {
    " ": toggle,
    ArrowRight: () => { stop(); forward(); },
    ArrowLeft: () => { stop(); show(at - 1); },
    Home: () => { stop(); show(0); },
    End: () => { stop(); show(last); },
  };
  first.onclick = actions.Home;
  back.onclick = actions.ArrowLeft;
  play.onclick = toggle;
  next.onclick = actions.ArrowRight;
  slider.oninput = () => { stop(); show(Number(slider.value)); };
  show(last);  // the page opens with the result; Play then starts over
  stop();
  return (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !(event.key in actions)) return;
    if (event.target.tagName === "BUTTON" && event.key === " ") return;  // the button handles it
    event.preventDefault();
    actions[event.key]();
  };
}

const sections = [...document.querySelectorAll("section")];
const keys = new Map(sections.map((section) => [section, player(section)]));
// Keys go to the section that has the focus, else to the first.
document.addEventListener("keydown", (event) => keys.get(event.target.closest?.("section") ?? sections[0])(event));
