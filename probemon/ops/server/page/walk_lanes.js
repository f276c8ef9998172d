// Pointer and keys over the lanes: point, pin, drag a window open, zoom.

import { $ } from "./elements.js";
import { linesOf } from "./said.js";
import { keepInside, windowOf, zoomBy, zoomTo } from "./zoom.js";

const DRAG = 8; // pixels

/** Let pointer and keys move over the lanes. */
export function walkLanes(app) {
  const area = $("lanes-slider");
  const placeAt = (clientX) => {
    const view = app.view();
    const { left, width } = area.getBoundingClientRect();
    const { from, to } = windowOf(app, view);
    return from + ((clientX - left) / width) * (to - from);
  };
  const indexAt = (event) => {
    const view = app.view();
    if (view === null || !view.choice.tokens.length) return null;
    const i = Math.floor(placeAt(event.clientX));
    return i >= 0 && i <= view.upto ? i : null;
  };
  let begun = null;
  const drag = $("lanes-drag");
  area.addEventListener("pointerdown", (event) => {
    if (event.button === 0) begun = event.clientX;
  });
  area.addEventListener("pointermove", (event) => {
    const wide = begun !== null && event.buttons === 1 && Math.abs(event.clientX - begun) > DRAG;
    drag.hidden = !wide;
    if (wide) {
      area.setPointerCapture(event.pointerId);
      const { left, width } = area.getBoundingClientRect();
      const [from, to] = [begun, event.clientX]
        .map((x) => Math.max(0, Math.min(width, x - left)))
        .sort((a, b) => a - b);
      drag.style.left = `${from}px`;
      drag.style.width = `${to - from}px`;
    } else app.hover(indexAt(event));
  });
  area.addEventListener("pointerleave", () => app.hover(null));
  const end = (event) => {
    const dragged = !drag.hidden;
    drag.hidden = true;
    if (dragged && event.type === "pointerup" && app.view() !== null) {
      const [from, to] = [placeAt(begun), placeAt(event.clientX)].sort((a, b) => a - b);
      area.dragged = true; // the click that follows is none
      zoomTo(app, from, to);
    }
    begun = null;
  };
  area.addEventListener("pointerup", end);
  area.addEventListener("pointercancel", end);
  area.addEventListener("click", (event) => {
    const i = area.dragged ? null : indexAt(event);
    area.dragged = false;
    if (i !== null) app.pin(i);
  });
  area.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey || app.view() === null) return;
      event.preventDefault();
      zoomBy(app, event.deltaY < 0 ? 0.75 : 1 / 0.75, placeAt(event.clientX));
    },
    { passive: false },
  );
  area.addEventListener("keydown", (event) => onKey(app, area, event));
}

function onKey(app, area, event) {
  const view = app.view();
  if (view === null || view.at === null || event.altKey || event.ctrlKey || event.metaKey) return;
  const last = view.upto;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: 1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key];
  const to =
    event.key === "Home"
      ? 0
      : event.key === "End"
        ? last
        : step === undefined
          ? null
          : Math.max(0, Math.min(last, view.at + step));
  if (event.key === "Escape") app.pin(null);
  else if (event.key === "+" || event.key === "=") zoomBy(app, 0.5);
  else if (event.key === "-") zoomBy(app, 2);
  else if (event.key === "0") {
    app.zoom = null;
    app.draw();
  } else if (to === null) return;
  else {
    app.pinAt(to);
    keepInside(app, to);
    area.setAttribute("aria-valuetext", linesOf(app.view(), to).join(". "));
  }
  event.preventDefault();
}
