// The part of an answer that the lanes show: all of it, or a window of tokens.

import { $ } from "./elements.js";
import { count } from "./words.js";

const LEAST = 12; // tokens
const ROOM = 48; // for a short answer to grow, so that its first tokens are not drawn as wide as the lane

/** The window {from, to} of a view: indices of its tokens, `to` exclusive. */
export function windowOf(app, { choice, upto }) {
  const n = choice.tokens.length;
  if (app.zoom === null || n <= LEAST) return { from: 0, to: Math.max(ROOM, n) };
  const size = Math.min(app.zoom.to - app.zoom.from, n);
  const from = Math.max(0, Math.min(app.zoom.from, Math.max(upto + 1, n) - size));
  return { from, to: from + size };
}

/** Show the tokens from one index to another alone. */
export function zoomTo(app, from, to) {
  const view = app.view();
  if (view === null) return;
  const n = view.choice.tokens.length;
  const size = Math.max(LEAST, Math.round(to - from));
  const begin = Math.max(0, Math.min(Math.round((from + to - size) / 2), n - size));
  app.zoom = size >= n ? null : { from: begin, to: begin + size };
  app.draw();
}

/** Show fewer tokens (`by` under 1) or more, around the one that is told of or a given one. */
export function zoomBy(app, by, around = null) {
  const view = app.view();
  if (view === null) return;
  const { from, to } = windowOf(app, view);
  const end = app.zoom === null ? Math.min(to, view.choice.tokens.length) : to;
  const middle = around ?? (view.at !== null && view.at >= from && view.at < end ? view.at : (from + end) / 2);
  const share = (middle - from) / (end - from);
  const size = (end - from) * by;
  zoomTo(app, middle - share * size, middle + (1 - share) * size);
}

/** Move the window so that a token is in it. */
export function keepInside(app, i) {
  if (app.zoom === null || (i >= app.zoom.from && i < app.zoom.to)) return;
  const size = app.zoom.to - app.zoom.from;
  zoomTo(app, i - size / 2, i + size / 2);
}

export function drawZoom(app, view, { from, to }) {
  const n = view.choice.tokens.length;
  const whole = app.zoom === null;
  const last = Math.min(to, n);
  $("zoom-what").textContent = whole
    ? `all ${count(n)} tokens`
    : `tokens ${count(from + 1)} to ${count(last)} of ${count(n)}`;
  $("zoom-all").hidden = whole;
  $("zoom-out").setAttribute("aria-disabled", String(whole));
  $("zoom-in").setAttribute("aria-disabled", String(last - from <= LEAST));
  const range = $("zoom-range");
  range.hidden = whole;
  range.max = String(Math.max(0, n - (to - from)));
  if (document.activeElement !== range) range.value = String(from);
  range.setAttribute("aria-valuetext", $("zoom-what").textContent);
}

/** Buttons, wheel with Ctrl, and a range. */
export function controlZoom(app) {
  $("zoom-in").addEventListener("click", () => zoomBy(app, 0.5));
  $("zoom-out").addEventListener("click", () => zoomBy(app, 2));
  $("zoom-all").addEventListener("click", () => {
    app.zoom = null;
    $("zoom-in").focus();
    app.draw();
  });
  $("zoom-range").addEventListener("input", ({ target }) => {
    const size = app.zoom.to - app.zoom.from;
    app.zoom = { from: Number(target.value), to: Number(target.value) + size };
    app.draw();
  });
}
