// A lane a concept over the tokens of an answer: its strength at each, where it fired and how near it was; below them
// what was looked at.

import { $, el } from "./elements.js";
import { plural } from "./words.js";
import { lanesOf, nearest, strengthAt } from "./digest.js";
import { cameOf, linesOf, nameOf, ruleOf, signed } from "./said.js";
import { badge } from "./now.js";
import { hueOf } from "./tokens.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 24;
const FOOT = 7;
const FULL = 5;
const LANES = 10;
const LEAST = 4;
const LOW = -4;

/** Columns of a lane: room for a short answer to grow, so that its first tokens are not drawn as wide as the lane. */
const columnsOf = (choice) => Math.max(48, choice.tokens.length);

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** A bar from the foot of a lane: over the line of the threshold where the concept fired, under it where it did not. */
function barOf(i, strength, fired) {
  const over = fired
    ? FOOT + 2 + (HEIGHT - FOOT - 2) * Math.min(1, Math.max(0, strength ?? 1) / FULL)
    : Math.max(0, FOOT * (1 - (strength ?? LOW) / LOW)) * 0.9;
  return over > 0.3 ? `M${i + 0.06} ${HEIGHT}v${-over.toFixed(2)}h0.88v${over.toFixed(2)}z` : "";
}

function pathsOf({ choice, upto }, c) {
  let fired = "";
  let near = "";
  for (let i = 0; i <= upto; i++) {
    const token = choice.tokens[i];
    const told = token.top.find(([other]) => other === c);
    if (token.unseen) continue;
    if (token.fired.includes(c)) fired += barOf(i, strengthAt(token, c), true);
    else if (told) near += barOf(i, told[2] ?? null, false);
  }
  return { fired, near };
}

const firstOf = (items, n) => items.slice(0, n).join(", ") + (items.length > n ? ", …" : "");

function strip(view, parts, label) {
  const n = columnsOf(view.choice);
  const svg = shape("svg", { viewBox: `0 0 ${n} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const [kind, d] of parts) if (d) svg.append(shape("path", { class: kind, d }));
  return el("div", { class: "strip", role: "img", "aria-label": label }, svg, unseenIn(view));
}

/**
 * Hatched stretches where nothing is known: elements, since what lies in a stretched drawing would be stretched, too.
 */
function unseenIn({ choice, upto }) {
  const n = columnsOf(choice);
  const stretches = [];
  for (let i = 0; i <= upto; i++) {
    if (!choice.tokens[i].unseen) continue;
    if (stretches.at(-1)?.[1] === i) stretches.at(-1)[1]++;
    else stretches.push([i, i + 1]);
  }
  return stretches.map(([begin, end]) => {
    const node = el("i", { class: "hatched" });
    node.style.left = `${(100 * begin) / n}%`;
    node.style.width = `${(100 * (end - begin)) / n}%`;
    return node;
  });
}

function laneOf(app, view, { c, n, nLead, peak, peakAt }, mark) {
  const { pack, choice } = view;
  const { fired, near } = pathsOf(view, c);
  const positions = choice.tokens
    .filter((token, i) => i <= view.upto && token.fired.includes(c))
    .map(({ position }) => position);
  const label = mark
    ? `${nameOf(pack, c)} fired at ${plural(n, "token")}: ${firstOf(positions, 12)}`
    : `${nameOf(pack, c)} never fired`;
  const tellsPeak = peak > -Infinity ? `, strongest ${signed(peak)} at token ${choice.tokens[peakAt].position}` : "";
  return el(
    "div",
    { class: `lane ${mark ? `h${hueOf(mark)}` : "quiet"}` },
    el(
      "button",
      {
        class: "concept",
        type: "button",
        "aria-pressed": String(view.concept === c),
        title: `${label}${tellsPeak}`,
        click: () => app.choose(c),
      },
      mark ? badge(mark) : "",
      el("bdi", {}, nameOf(pack, c)),
    ),
    strip(
      view,
      [
        ["near", near],
        ["threshold", `M0 ${HEIGHT - FOOT}h${columnsOf(choice)}v0.6h${-columnsOf(choice)}z`],
        ["fired", fired],
      ],
      label,
    ),
    el("span", { class: "number" }, mark ? `${nLead}× ${peak > -Infinity ? signed(peak) : ""}` : signed(peak)),
  );
}

/** How many probes were active at each token. */
function coverageLane(view) {
  const { choice, upto } = view;
  const tokens = choice.tokens.slice(0, upto + 1);
  const most = Math.max(1, ...tokens.map(({ n_active }) => n_active));
  const active = tokens
    .map(({ n_active, unseen }, i) =>
      unseen ? "" : `M${i + 0.06} ${HEIGHT}v${-((HEIGHT * n_active) / most).toFixed(2)}h0.88V${HEIGHT}z`,
    )
    .join("");
  const n = tokens.filter(({ unseen }) => unseen).length;
  return el(
    "div",
    { class: "lane coverage" },
    el("span", { class: "concept dim" }, "probes active"),
    strip(view, [["active", active]], `probes active at each token, at most ${most}; ${plural(n, "token")} unseen`),
    el("span", { class: "number" }, `≤ ${most}`),
  );
}

/** A sign at each token at which a rule was met, or was not known. */
function eventMarks({ choice, upto }) {
  const byPosition = Map.groupBy(choice.events, ({ position }) => position);
  return [...byPosition].flatMap(([position, events]) => {
    const i = choice.tokens.findIndex((token) => token.position === position);
    const stops = events.some(({ action }) => action === "stop");
    if (i < 0 || i > upto) return [];
    const told = events.map((event) => `${ruleOf(event)} ${cameOf(event)}`);
    const title = `token ${position}: ${told.join(", ")}`;
    const node = el("span", { class: `flag ${stops ? "stop" : "record"}`, title }, stops ? "■" : "▲");
    node.style.left = `${(100 * (i + 0.5)) / columnsOf(choice)}%`;
    return [node];
  });
}

/** Draw the lanes of a view; `all`: every concept that led. */
export function drawLanes(app, view) {
  const box = $("lanes");
  const empty = view === null || !view.choice.tokens.length;
  $("lanes-panel").classList.toggle("empty", empty);
  if (empty) {
    box.replaceChildren();
    $("lanes-more").hidden = true;
    return;
  }
  const { choice, digest, upto, concept } = view;
  const key = [choice.version, upto, concept, app.allLanes, digest.marks.size].join();
  if (box.choice !== choice || box.key !== key) {
    const lanes = lanesOf(digest, app.allLanes ? Infinity : LANES);
    const nears = lanes.length < LEAST ? nearest(digest, LEAST - lanes.length) : [];
    const left = [...digest.concepts.values()].filter(({ nLead }) => nLead).length - lanes.length;
    const chosen =
      concept !== null && digest.concepts.has(concept) && !lanes.some(({ c }) => c === concept)
        ? [digest.concepts.get(concept)]
        : [];
    const focused = box.contains(document.activeElement)
      ? [...box.querySelectorAll("button")].indexOf(document.activeElement)
      : -1;
    box.replaceChildren(
      ...[...lanes, ...chosen].map((lane) => laneOf(app, view, lane, digest.marks.get(lane.c) ?? 1)),
      ...nears.map((lane) => laneOf(app, view, lane, 0)),
      coverageLane(view),
      ...(choice.events.length
        ? [
            el(
              "div",
              { class: "lane axis" },
              el("span", { class: "concept dim" }, "rules"),
              el("div", { class: "flags" }, eventMarks(view)),
              el("span"),
            ),
          ]
        : []),
    );
    if (focused >= 0) box.querySelectorAll("button")[focused]?.focus();
    $("lanes-more").hidden = left <= 0 && !app.allLanes;
    $("lanes-more").textContent = app.allLanes ? "Fewer" : `All ${left + lanes.length}`;
    box.choice = choice;
    box.key = key;
  }
  drawCursor(view);
}

function drawCursor({ choice, at }) {
  const cursor = $("lanes-cursor");
  const slider = $("lanes-slider");
  const tokens = choice.tokens;
  cursor.hidden = at === null;
  if (at === null) return;
  cursor.style.setProperty("--at", String((at + 0.5) / columnsOf(choice)));
  slider.setAttribute("aria-valuemin", tokens[0].position);
  slider.setAttribute("aria-valuemax", tokens.at(-1).position);
  slider.setAttribute("aria-valuenow", tokens[at].position);
}

/** Let pointer and keys move over the lanes. */
export function walkLanes(app) {
  const area = $("lanes-slider");
  const indexAt = (event) => {
    const track = $("lanes").querySelector(".strip");
    const view = app.view();
    if (!track || view === null) return null;
    const { left, width } = track.getBoundingClientRect();
    const share = (event.clientX - left) / width;
    const i = Math.floor(share * columnsOf(view.choice));
    return i >= 0 && i <= view.upto ? i : null;
  };
  area.addEventListener("pointermove", (event) => app.hover(event.target.closest("button") ? null : indexAt(event)));
  area.addEventListener("pointerleave", () => app.hover(null));
  area.addEventListener("click", (event) => {
    const i = event.target.closest("button") ? null : indexAt(event);
    if (i !== null) app.pin(i);
  });
  area.addEventListener("keydown", (event) => {
    const view = app.view();
    if (event.target !== area || view === null || view.at === null) return;
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
    else if (to === null) return;
    else {
      app.pinAt(to);
      area.setAttribute("aria-valuetext", linesOf(app.view(), to).join(". "));
    }
    event.preventDefault();
  });
}
