// Two answers to one question side by side, and how often each concept fires in either.

import { $, el } from "./elements.js";
import { refill } from "./focus.js";
import { coverageOf } from "./coverage.js";
import { colourOf } from "./branches.js";
import { foremost } from "./digest.js";
import { bar, nameButton } from "./parts.js";
import { askedOf, clock, endingOf } from "./runs.js";
import { newestFirst } from "./state.js";
import { drawTokens } from "./tokens.js";
import { plural } from "./words.js";
import { clip } from "./harmless.js";

const MOST = 30; // answers that are offered, and those that are fetched to know their whole questions
const ROWS = 12;

const fetched = new Map(); // by how a question begins: ids

/** All that a run answers, but for its system prompt. */
const questionOf = ({ kind, messages, prompt }) =>
  JSON.stringify([kind, messages?.filter(({ role }) => !["system", "developer"].includes(role)) ?? null, prompt]);

/** Other answers to the question of a run: [{run, i}]. One of which only the beginning is known is fetched first. */
function othersOf(app, run) {
  if (!run.whole) return [];
  const asked = questionOf(run);
  const beginning = askedOf(run);
  if (!fetched.has(beginning)) fetched.set(beginning, new Set());
  const there = fetched.get(beginning);
  const found = [];
  for (const other of newestFirst(app.state)) {
    if (!other.whole && askedOf(other) === beginning && !there.has(other.id) && there.size < MOST) {
      there.add(other.id);
      app.load(other.id);
    }
    if (!other.whole || questionOf(other) !== asked) continue;
    other.choices.forEach((_, i) => {
      if (other !== run || i !== app.place.choice) found.push({ run: other, i });
    });
    if (!other.choices.length && other !== run) found.push({ run: other, i: 0 });
  }
  return found.slice(0, MOST);
}

/** How an answer was drawn: "temperature 0.7, seed 5". */
export function settingsOf(run) {
  const { temperature, seed } = run.options ?? {};
  const system = run.messages?.find(({ role }) => role === "system");
  return [
    temperature === undefined || temperature === null ? "" : `temperature ${clip(String(temperature), 8)}`,
    seed === undefined || seed === null || temperature === 0 ? "" : `seed ${clip(String(seed), 12)}`,
    system ? "with a system prompt" : "",
  ]
    .filter(Boolean)
    .join(", ");
}

const nameOf = ({ run, i }) =>
  [
    run.created ? clock(run.created) : "saved",
    run.choices.length > 1 ? `answer ${i + 1}` : "",
    settingsOf(run),
    clip((run.choices[i]?.text ?? "").trim(), 40),
  ]
    .filter(Boolean)
    .join(" · ");

const valueOf = ({ run, i }) => `${i} ${run.id}`;

function drawPick(app, run) {
  const pick = $("compare-pick");
  const others = run === null ? [] : othersOf(app, run);
  const { other, otherChoice } = app.place;
  $("compare").hidden = !others.length && other === null;
  const key = JSON.stringify([run?.id, app.place, others.map((found) => [valueOf(found), nameOf(found)])]);
  if (pick.key === key || document.activeElement === pick) return;
  pick.key = key;
  pick.replaceChildren(
    el("option", { value: "" }, "nothing"),
    ...others.map((found) => el("option", { value: valueOf(found) }, nameOf(found))),
  );
  pick.value = other === null ? "" : `${otherChoice} ${other}`;
}

export function drawCompare(app, run) {
  drawPick(app, run);
  const view = app.other();
  const asked = app.place.other !== null;
  $("thread").classList.toggle("comparing", asked);
  $("other-panel").hidden = !asked;
  if (!asked) return;
  const box = $("other");
  if (box.choice !== (view?.choice ?? null)) {
    box.replaceChildren();
    Object.assign(box, { choice: view?.choice ?? null, drawn: [] });
  }
  const known = app.state.runs.get(app.place.other);
  $("other-state").textContent = view === null ? (known ? "" : "this answer is not kept") : endingOf(view.run, view.i);
  $("other-foot").textContent =
    view === null ? "" : [settingsOf(view.run), coverageOf(view)].filter(Boolean).join(" · ");
  if (view !== null) drawTokens(box, view);
}

/** At how many tokens each concept fires, here and there. */
export function drawDifference(app, view, other) {
  const rows = new Map();
  const note = (side, told, pack, c) => {
    const { id } = pack.concepts[c];
    rows.set(id, { here: 0, there: 0, ...rows.get(id), [side]: told.concepts.get(c).n });
  };
  for (const { c } of foremost(view.digest)) note("here", view.digest, view.pack, c);
  for (const { c } of foremost(other.digest)) note("there", other.digest, other.pack, c);
  for (const [id, row] of rows) {
    for (const [side, seen] of [
      ["here", view],
      ["there", other],
    ])
      row[side] = seen.digest.concepts.get(seen.pack.byId.get(id))?.n ?? 0;
  }
  const sorted = [...rows].sort(
    ([, a], [, b]) => Math.abs(b.here - b.there) - Math.abs(a.here - a.there) || b.here - a.here,
  );
  const most = Math.max(1, ...sorted.map(([, { here, there }]) => Math.max(here, there)));
  const shown = app.allRows ? sorted : sorted.slice(0, ROWS);
  $("now-what").textContent = "in both answers";
  const side = (label, n) =>
    el(
      "span",
      { class: "side-count" },
      el("span", { class: "number" }, `${label}: ${plural(n, "token")}`),
      bar(n / most),
    );
  refill(
    $("now-rows"),
    ...shown.map(([id, { here, there }]) => {
      const c = view.pack.byId.get(id);
      return el(
        "li",
        { class: `difference ${c === undefined ? "h8" : colourOf(view.pack, c)}` },
        c === undefined ? el("bdi", {}, clip(id, 60)) : nameButton(app, view, c),
        side("this", here),
        side("other", there),
      );
    }),
    ...(shown.length ? [] : [el("li", { class: "nothing" }, "No concept fired in either answer.")]),
  );
  $("now-last").textContent =
    sorted.length > shown.length
      ? `and ${plural(sorted.length - shown.length, "concept")} with smaller differences`
      : "";
}

export function controlCompare(app) {
  $("compare-pick").addEventListener("change", ({ target }) => {
    const [, i, id] = target.value.match(/^(\d+) ([^]+)$/) ?? [];
    app.go({ ...app.place, token: null, other: id ?? null, otherChoice: Number(i ?? 0) });
  });
  $("compare-end").addEventListener("click", () => app.go({ ...app.place, other: null, otherChoice: 0 }));
}
