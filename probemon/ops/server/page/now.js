// The concepts beside the text: those of the token that is pointed at, pinned or newest, or those of the whole answer.
// A chosen concept has its card there (card.js), two answers their comparison (compare.js).

import { $, el } from "./elements.js";
import { plural } from "./words.js";
import { colourOf } from "./branches.js";
import { drawCard } from "./card.js";
import { drawDifference } from "./compare.js";
import { foremost, ruled, tint } from "./digest.js";
import { refill } from "./focus.js";
import { clip } from "./harmless.js";
import { bar, nameButton, tokenButton } from "./parts.js";
import { above, cameOf, inOneLine, nameOf, quoted, right, strengthOf, toldOf } from "./said.js";
import { nMissing } from "./state.js";

const ROWS = 6;
const FULL = 5; // strength of a full bar

/** At how many tokens a concept fires, with links to the first and to that at which it is strongest. */
function placesOf(app, view, c) {
  const known = view.digest.concepts.get(c);
  if (!known) return ["does not fire"];
  const first = tokenButton(app, view, known.first, `first ${c}`, known.n > 1 ? "first " : "");
  if (known.n === 1) return ["fires at ", first];
  const peak = known.peakAt !== known.first && known.peak > -Infinity;
  const strongest = peak ? [", ", tokenButton(app, view, known.peakAt, `strongest ${c}`, "strongest ")] : [];
  return [`fires at ${plural(known.n, "token")}: `, first, ...strongest];
}

/** The concepts above one, with the strengths of those that fire at a token. */
const pathOf = (pack, c, strengths) =>
  pack
    .path(c)
    .slice(0, -1)
    .map((a) => nameOf(pack, a) + (strengths?.has(a) ? ` (${strengthOf(pack, a, strengths.get(a))})` : ""))
    .join(" › ");

/** A concept with its strength, place in the hierarchy, how often it is right, and where it fires. */
function row(app, view, { c, score = null, strength }, events, strengths = null) {
  const { pack, digest } = view;
  const known = digest.concepts.get(c);
  const event = events?.find(({ action }) => action === "stop") ?? events?.[0];
  return el(
    "li",
    { class: `leader ${colourOf(pack, c)} t${tint(strength)}` },
    nameButton(app, view, c, inOneLine(pack, { c, score, strength })),
    el("span", { class: "number" }, known ? strengthOf(pack, c, strength, score) : ""),
    bar(Math.max(0.01, strength ?? 1) / FULL),
    event &&
      el("span", { class: `more tag ${event.action}` }, `${event.action === "stop" ? "■" : "▲"} rule ${cameOf(event)}`),
    above(pack, c) && el("span", { class: "more" }, pathOf(pack, c, strengths)),
    el("span", { class: "more where" }, ...placesOf(app, view, c), right(pack, c) && ` · ${right(pack, c)}`),
  );
}

/** What is said of an answer at which nothing fired: of tokens that nobody looked at nothing is known. */
function nothingIn(view) {
  const { tokens } = view.choice;
  if (tokens.every(({ unseen }) => unseen)) return "No token of the answer was checked, so nothing is known about it.";
  const missing = nMissing(view.choice) ? " at the tokens that reached this page" : "";
  const told = toldOf(view) ? ` (${toldOf(view)})` : "";
  return `No ${told ? "requested " : ""}concept fired${missing}${told}. One may be present that no probe found.`;
}

function drawWhole(app, view) {
  const { digest, choice, pack, upto } = view;
  const rules = new Map(ruled(choice, pack, upto).map(({ c, events }) => [c, events]));
  const strengthIn = (found) => (found && found.peak > -Infinity ? found.peak : null);
  const all = foremost(digest).map((found) => found.c);
  const order = [...rules.keys(), ...all.filter((c) => !rules.has(c))];
  const most = app.allRows ? Infinity : Math.max(ROWS, rules.size);
  $("now-what").textContent = "in the whole answer";
  refill(
    $("now-rows"),
    ...order
      .slice(0, most)
      .map((c) => row(app, view, { c, strength: strengthIn(digest.concepts.get(c)) }, rules.get(c))),
    ...(order.length ? [] : [el("li", { class: "nothing" }, nothingIn(view))]),
  );
  const left = order.length - most;
  $("now-last").replaceChildren(...(left > 0 ? [more(app, `Show ${plural(left, "more concept")}`)] : []));
}

const more = (app, words) =>
  el(
    "button",
    {
      class: "plain",
      type: "button",
      click: () => {
        app.allRows = true;
        app.draw();
      },
    },
    words,
  );

function drawToken(app, view) {
  const { choice, digest, at, pack } = view;
  const token = choice.tokens[at];
  $("now-what").replaceChildren(
    view.pinned === at ? "pinned: " : view.hovered ? "at " : "now, at ",
    el("bdi", {}, quoted(token)),
    ` token ${at + 1}`,
  );
  const leading = digest.leaders[at] ?? [];
  const near = digest.near[at] ?? [];
  const rules = new Map(
    ruled(choice, pack, at)
      .map(({ c, events }) => [c, events.filter(({ position }) => position === token.position)])
      .filter(([, events]) => events.length),
  );
  const others = [...rules.keys()].filter((c) => !leading.some((found) => found.c === c));
  const strengths = new Map(token.fired.map((c, i) => [c, token.strengths[i]]));
  const rows = [...others.map((c) => ({ c, strength: strengths.get(c) ?? null })), ...leading]
    .slice(0, ROWS)
    .map((found) => row(app, view, found, rules.get(found.c), strengths));
  if (token.unseen)
    rows.push(el("li", { class: "nothing hatched" }, el("span", {}, `Not checked: ${clip(token.unseen, 200)}.`)));
  else if (!leading.length) {
    const told = toldOf(view) ? "requested " : "";
    rows.push(
      el("li", { class: "nothing" }, `No ${told}concept fires at this token.${near.length ? " Closest:" : ""}`),
    );
    for (const found of near.slice(0, 3))
      rows.push(
        el(
          "li",
          { class: "near" },
          el("bdi", {}, nameOf(pack, found.c)),
          el("span", { class: "number" }, strengthOf(pack, found.c, found.strength, found.score)),
        ),
      );
  }
  if (leading.length > ROWS)
    rows.push(el("li", { class: "dim" }, `and ${plural(leading.length - ROWS, "more concept")}`));
  refill($("now-rows"), ...rows);
  $("now-last").replaceChildren(...lastFired(app, view));
}

/** Draw the panel beside the text. */
export function drawNow(app, view) {
  const empty = view === null || view.at === null;
  $("now-empty").hidden = !empty;
  $("now-body").hidden = empty;
  const isWhole = !empty && view.choice.finish !== null && !view.hovered && view.pinned === null && app.replay === null;
  $("unpin").hidden = empty || (view.pinned === null && view.concept === null);
  $("unpin").textContent = view?.concept === null ? "Whole answer" : "All concepts";
  const other = empty ? null : app.other();
  if (empty) $("now-what").textContent = "";
  else if (view.concept !== null) drawCard(app, view);
  else if (other !== null && isWhole) drawDifference(app, view, other);
  else if (isWhole) drawWhole(app, view);
  else drawToken(app, view);
}

/** Where something last fired, for a token at which nothing does. */
function lastFired(app, view) {
  const { digest, at, pack } = view;
  if (digest.leaders[at]?.length) return [];
  let i = Math.min(at, digest.leaders.length) - 1;
  while (i >= 0 && !digest.leaders[i].length) i--;
  if (i < 0) return [];
  return ["Last fired: ", tokenButton(app, view, i, "last", `${nameOf(pack, digest.leaders[i][0].c)} at `)];
}
