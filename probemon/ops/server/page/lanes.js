// A lane for each concept over the tokens of an answer: where it fired and how strongly, and how near it was elsewhere;
// below them what was checked. A column of pixels shows the strongest of its tokens, so that none is lost.

import { $, el } from "./elements.js";
import { count, plural } from "./words.js";
import { colourOf } from "./branches.js";
import { lanesOf, nearest, ruled } from "./digest.js";
import { refill } from "./focus.js";
import { nameButton } from "./parts.js";
import { cameOf, nameOf, ruleOf, strengthOf } from "./said.js";
import { drawZoom, windowOf } from "./zoom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 24;
const FOOT = 7;
const FULL = 5;
const LANES = 10;
const MANY = 18; // on a wide window
const LEAST = 4;
const LOW = -4;
const COLUMN = 2.5; // pixels: the narrowest that is seen

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** The columns of a window: {from, to, n, columnOf}, at most one for each token and each few pixels. */
function columnsOf(part, width) {
  const span = part.to - part.from;
  const n = Math.max(1, Math.min(span, Math.floor((width || 200) / COLUMN)));
  return { ...part, n, columnOf: (i) => Math.floor(((i - part.from) * n) / span) };
}

/** The greatest of the values at tokens, column by column; -Infinity where there is none. */
export function pooled(at, values, { from, to, n, columnOf }) {
  const most = new Float64Array(n).fill(-Infinity);
  for (let k = 0; k < at.length; k++) {
    if (at[k] < from || at[k] >= to) continue;
    const column = columnOf(at[k]);
    if (values[k] > most[column]) most[column] = values[k];
  }
  return most;
}

/** Bars from the foot of a lane: over the line of the threshold where the concept fired, under it where it did not. */
const fullBar = (x) => FOOT + 3 + (HEIGHT - FOOT - 3) * Math.min(1, Math.max(0, x) / FULL);
const lowBar = (x) => Math.max(0, FOOT * (1 - x / LOW)) * 0.9;

function pathOf(most, height) {
  let d = "";
  most.forEach((x, k) => {
    const h = x === -Infinity ? 0 : height(x);
    if (h > 0.3) d += `M${k + 0.04} ${HEIGHT}v${-h.toFixed(2)}h.92V${HEIGHT}z`;
  });
  return d;
}

const firstOf = (items, n) => items.slice(0, n).join(", ") + (items.length > n ? ", …" : "");

function strip(view, columns, parts, label) {
  const svg = shape("svg", {
    viewBox: `0 0 ${columns.n} ${HEIGHT}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  for (const [kind, d] of parts) if (d) svg.append(shape("path", { class: kind, d }));
  return el("div", { class: "strip", role: "img", "aria-label": label }, svg, unseenIn(view, columns));
}

/** Hatched where nothing is known: elements, since what lies in a stretched drawing would be stretched, too. */
function unseenIn({ choice, upto }, { from, to, n, columnOf }) {
  const stretches = [];
  for (let i = from; i < Math.min(to, upto + 1); i++) {
    if (!choice.tokens[i].unseen) continue;
    const column = columnOf(i);
    if (stretches.length && stretches.at(-1)[1] >= column) stretches.at(-1)[1] = column + 1;
    else stretches.push([column, column + 1]);
  }
  return stretches.map(([begin, end]) => {
    const node = el("i", { class: "hatched" });
    node.style.left = `${(100 * begin) / n}%`;
    node.style.width = `${(100 * (end - begin)) / n}%`;
    return node;
  });
}

function laneOf(app, view, columns, lane, fires) {
  const { pack, choice, digest } = view;
  const { c, n, peak, peakAt } = lane;
  const near = digest.nears.get(c);
  const label = fires
    ? `${nameOf(pack, c)} fires at ${plural(n, "token")}: ${firstOf(
        lane.at.map((i) => i + 1),
        12,
      )}`
    : `${nameOf(pack, c)} does not fire`;
  const tellsPeak =
    peak > -Infinity
      ? `, at its strongest ${strengthOf(pack, c, peak)} at token ${peakAt + 1}`
      : "";
  const lit = fires
    ? pooled(
        lane.at,
        lane.strengths.map((x) => x ?? 1),
        columns,
      )
    : [];
  const dim = near
    ? pooled(
        near.at,
        near.strengths.map((x) => x ?? LOW),
        columns,
      )
    : [];
  return el(
    "div",
    { class: `lane ${colourOf(pack, c)} ${fires ? "" : "quiet"}` },
    nameButton(app, view, c, `${label}${tellsPeak}`),
    strip(
      view,
      columns,
      [
        ["near", pathOf(dim, lowBar)],
        ["threshold", `M0 ${HEIGHT - FOOT}h${columns.n}v.6h${-columns.n}z`],
        ["fired", pathOf(lit, fullBar)],
      ],
      label,
    ),
    el("span", { class: "number" }, fires ? plural(n, "token") : "close"),
  );
}

/** How many concepts were scored at each token. */
function coverageLane(view, columns) {
  const { choice, upto } = view;
  const tokens = choice.tokens.slice(0, upto + 1);
  const seen = tokens.map((token, i) => (token.unseen ? -1 : i)).filter((i) => i >= 0);
  const most = Math.max(1, ...seen.map((i) => tokens[i].n_active));
  const values = seen.map((i) => tokens[i].n_active / most);
  const unseen = plural(tokens.length - seen.length, "token");
  const label = `concepts scored at each token, at most ${most}; ${unseen} not checked`;
  const d = pathOf(pooled(seen, values, columns), (x) => HEIGHT * x);
  return el(
    "div",
    { class: "lane coverage" },
    el("span", { class: "concept dim", title: label }, "scored"),
    strip(view, columns, [["active", d]], label),
    el("span", { class: "number" }, `up to ${count(most)}`),
  );
}

/** A sign at each token at which a rule was met, or was not known. */
function eventMarks({ choice, upto }, { from, to }) {
  const byPosition = Map.groupBy(choice.events, ({ position }) => position);
  return [...byPosition].flatMap(([position, events]) => {
    const i = choice.tokens.findIndex((token) => token.position === position);
    const stops = events.some(({ action }) => action === "stop");
    if (i < from || i >= to || i > upto) return [];
    const told = events.map((event) => `${ruleOf(event)} ${cameOf(event)}`);
    const title = `token ${i + 1}: ${told.join(", ")}`;
    const node = el("span", { class: `flag ${stops ? "stop" : "record"}`, title }, stops ? "■" : "▲");
    node.style.left = `${(100 * (i + 0.5 - from)) / (to - from)}%`;
    return [node];
  });
}

/** The lanes of a view: concepts that led, those of rules, the chosen one; [lane, whether it fires]. */
function chosenLanes(app, view) {
  const { choice, digest, pack, upto, concept } = view;
  const most = app.allLanes ? Infinity : innerWidth >= 1500 ? MANY : LANES;
  const lanes = lanesOf(digest, most);
  const further = [...ruled(choice, pack, upto).map(({ c }) => c), ...(concept === null ? [] : [concept])];
  const bare = (c) => digest.concepts.get(c) ?? { c, n: 0, peak: -Infinity, peakAt: 0, at: [], strengths: [] };
  for (const c of further) if (!lanes.some((lane) => lane.c === c)) lanes.push(bare(c));
  const nears = lanes.length < LEAST ? nearest(digest, LEAST - lanes.length) : [];
  const shown = new Set(lanes.map(({ c }) => c));
  const left = [...digest.concepts.values()].filter(({ c, nLead }) => nLead && !shown.has(c)).length;
  return { lanes: [...lanes.map((lane) => [lane, lane.n > 0]), ...nears.map((lane) => [lane, false])], left };
}

/** Draw the lanes of a view. */
export function drawLanes(app, view) {
  const box = $("lanes");
  const empty = view === null || !view.choice.tokens.length;
  $("lanes-panel").classList.toggle("empty", empty);
  if (empty) {
    box.replaceChildren();
    box.choice = null;
    $("lanes-more").hidden = true;
    return;
  }
  const { choice, digest, upto, concept } = view;
  const part = windowOf(app, view);
  const width = $("lanes-slider").clientWidth;
  const key = [choice.version, upto, concept, app.allLanes, digest.marks.size, part.from, part.to, width].join();
  if (box.choice !== choice || box.key !== key) {
    const columns = columnsOf(part, width);
    const { lanes, left } = chosenLanes(app, view);
    const rules = choice.events.length
      ? [
          el(
            "div",
            { class: "lane axis" },
            el("span", { class: "concept dim" }, "rules"),
            el("div", { class: "flags" }, eventMarks(view, part)),
            el("span"),
          ),
        ]
      : [];
    refill(
      box,
      ...rules,
      ...lanes.map(([lane, fires]) => laneOf(app, view, columns, lane, fires)),
      coverageLane(view, columns),
    );
    $("lanes-more").hidden = left <= 0 && !app.allLanes;
    $("lanes-more").textContent = app.allLanes ? "Fewer" : `Show ${plural(left, "more concept")}`;
    box.choice = choice;
    box.key = key;
    drawZoom(app, view, part);
  }
  drawCursor(view, part, isTold(app, view));
}

/** Whether one token is told of, not the whole answer. */
const isTold = (app, { choice, hovered, pinned }) =>
  choice.finish === null || hovered || pinned !== null || app.replay !== null;

function drawCursor({ choice, at }, { from, to }, told) {
  const cursor = $("lanes-cursor");
  const slider = $("lanes-slider");
  cursor.hidden = !told || at === null || at < from || at >= to;
  if (at === null) return;
  cursor.style.setProperty("--at", String((at + 0.5 - from) / (to - from)));
  slider.setAttribute("aria-valuemin", 1);
  slider.setAttribute("aria-valuemax", choice.tokens.length);
  slider.setAttribute("aria-valuenow", at + 1);
}
