// What is thought at one token: the concepts that lead there with strength and precision, and where each began.

import { $, el } from "./elements.js";
import { plural } from "./words.js";
import { foremost, tint } from "./digest.js";
import { refill } from "./focus.js";
import { clip } from "./harmless.js";
import { above, inOneLine, nameOf, quoted, right, strengthOf, toldOf } from "./said.js";
import { nMissing } from "./state.js";
import { hueOf } from "./tokens.js";

const ROWS = 5;
const FULL = 5; // strength of a full bar

export const badge = (mark, kind = "") => el("span", { class: `badge h${hueOf(mark)} ${kind}` }, String(mark));

function bar(strength) {
  const inner = el("i");
  const node = el("span", { class: "bar", "aria-hidden": "true" }, inner);
  inner.style.width = `${Math.max(4, Math.min(100, (100 * (strength ?? 1)) / FULL))}%`;
  return node;
}

function row(app, view, at) {
  const { pack, digest, choice } = view;
  const known = digest.concepts.get(at.c);
  const mark = digest.marks.get(at.c);
  const first = choice.tokens[known.first];
  return el(
    "li",
    { class: `leader h${mark ? hueOf(mark) : 0} t${tint(at.strength)}` },
    el(
      "button",
      {
        class: "concept",
        type: "button",
        "data-stop": `concept ${at.c}`,
        "aria-pressed": String(view.concept === at.c),
        title: inOneLine(pack, at),
        click: () => app.choose(at.c),
      },
      mark ? badge(mark) : "",
      el("bdi", {}, nameOf(pack, at.c)),
    ),
    el("span", { class: "number" }, strengthOf(pack, at.c, at.strength, at.score)),
    bar(at.strength),
    el("span", { class: "more" }, [above(pack, at.c), right(pack, at.c)].filter(Boolean).join(" · ")),
    el(
      "button",
      { class: "since", type: "button", "data-stop": `from ${at.c}`, click: () => app.pin(known.first) },
      known.first === view.at ? "begins here" : `since ${quoted(first)} ${first.position}`,
    ),
  );
}

/** What the whole answer was about: of an answer that has ended, while no token is pointed at. */
function wholeRow(app, view, { c, n, nLead, peak, peakAt, first }) {
  const { pack, choice, digest } = view;
  const mark = digest.marks.get(c);
  const strength = peak > -Infinity ? peak : null;
  const link = (stop, i) =>
    el(
      "button",
      { class: "since", type: "button", "data-stop": `${stop} ${c}`, click: () => app.pin(i) },
      `${stop} ${quoted(choice.tokens[i])} ${choice.tokens[i].position}`,
    );
  return el(
    "li",
    { class: `leader h${hueOf(mark)} t${tint(strength)}` },
    el(
      "button",
      {
        class: "concept",
        type: "button",
        "data-stop": `concept ${c}`,
        "aria-pressed": String(view.concept === c),
        click: () => app.choose(c),
      },
      badge(mark),
      el("bdi", {}, nameOf(pack, c)),
    ),
    el("span", { class: "number" }, strengthOf(pack, c, strength)),
    bar(strength),
    el("span", { class: "more" }, [above(pack, c), right(pack, c)].filter(Boolean).join(" · ")),
    el(
      "span",
      { class: "more where" },
      `leads at ${nLead} of ${plural(n, "token")}, `,
      link("from", first),
      ...(peakAt === first ? [] : [", ", link("strongest at", peakAt)]),
    ),
  );
}

/** What is said of an answer at which nothing fired: of tokens that nobody looked at nothing is known. */
function nothingIn(view) {
  const { tokens } = view.choice;
  if (tokens.every(({ unseen }) => unseen)) return "No token of the answer was scored, so nothing is known about it.";
  const missing = nMissing(view.choice) ? " at the tokens that reached this page" : "";
  const told = toldOf(view) ? ` (${toldOf(view)})` : "";
  return `No ${told ? "requested " : ""}concept was over its threshold${missing}${told}. A concept may be present even if no probe fires.`;
}

function drawWhole(app, view) {
  const all = foremost(view.digest);
  $("now-what").textContent = "in the whole answer";
  $("unpin").hidden = view.concept === null;
  refill(
    $("now-rows"),
    ...all.slice(0, ROWS - 1).map((found) => wholeRow(app, view, found)),
    ...(all.length
      ? []
      : [
          el(
            "li",
            { class: "nothing" },
            nothingIn(view),
          ),
        ]),
  );
  $("now-last").textContent =
    all.length > ROWS - 1 ? `and ${plural(all.length - ROWS + 1, "more concept")}: see the lanes` : "";
}

/** Draw the panel of the token `view.at`, and a line on how much of the answer was looked at. */
export function drawNow(app, view) {
  $("now-empty").hidden = view !== null && view.at !== null;
  $("now-body").hidden = !$("now-empty").hidden;
  if ($("now-body").hidden) {
    $("now-what").textContent = "";
    return;
  }
  if (view.choice.finish !== null && !view.hovered && view.pinned === null && app.replay === null) {
    drawWhole(app, view);
    return;
  }
  const { choice, digest, at, pack } = view;
  const token = choice.tokens[at];
  $("now-what").replaceChildren(
    view.pinned === at ? "pinned: " : view.hovered ? "at " : "now, at ",
    el("bdi", {}, quoted(token)),
    ` token ${token.position}`,
  );
  $("unpin").hidden = view.pinned === null && view.concept === null;
  const leading = digest.leaders[at] ?? [];
  const near = digest.near[at] ?? [];
  const rows = leading.slice(0, ROWS).map((found) => row(app, view, found));
  if (token.unseen)
    rows.push(el("li", { class: "nothing hatched" }, el("span", {}, `Unseen: ${clip(token.unseen, 200)}.`)));
  else if (!leading.length) {
    rows.push(
      el(
        "li",
        { class: "nothing" },
        `No ${toldOf(view) ? "requested " : ""}concept is over its threshold at this token.${near.length ? " Nearest:" : ""}`,
      ),
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
    rows.push(el("li", { class: "dim" }, `and ${plural(leading.length - ROWS, "more concept")} at this token`));
  refill($("now-rows"), ...rows);
  $("now-last").replaceChildren(...lastFired(app, view));
}

/** Where something last fired, for a token at which nothing does. */
function lastFired(app, { digest, at, choice, pack }) {
  if (digest.leaders[at]?.length) return [];
  let i = Math.min(at, digest.leaders.length) - 1;
  while (i >= 0 && !digest.leaders[i].length) i--;
  if (i < 0) return [];
  return [
    "Last fired: ",
    el(
      "button",
      { class: "since", type: "button", click: () => app.pin(i) },
      `${nameOf(pack, digest.leaders[i][0].c)} at ${quoted(choice.tokens[i])} ${choice.tokens[i].position}`,
    ),
  ];
}

/** How much was looked at in the whole answer, in a line. */
export function coverageOf(view) {
  const { choice, pack, upto } = view;
  const missing = nMissing(choice);
  const tokens = choice.tokens.slice(0, upto + 1);
  const unseen = tokens.filter((token) => token.unseen);
  const seen = tokens.length - unseen.length;
  if (!tokens.length) return "";
  const sum = (name) => tokens.reduce((so_far, token) => so_far + (token.unseen ? 0 : token[name]), 0);
  const perToken = (name) => (sum(name) / Math.max(1, seen)).toFixed(0);
  const shed = tokens.filter((token) => token.n_shed).length;
  const mute = pack.concepts.filter(({ threshold }) => threshold === null || threshold >= 1).length;
  return [
    ...(missing ? [`${plural(missing, "token")} did not reach this page: nothing is known about them here`] : []),
    `${plural(seen, "token")} seen, ${unseen.length} unseen`,
    `${perToken("n_active")} of ${plural(pack.concepts.length, "probe")} active per token`,
    ...(sum("n_dropped") ? [`${plural(sum("n_dropped"), "score")} dropped by a limit or late`] : []),
    ...(shed ? [`the latency budget left out probes at ${plural(shed, "token")}`] : []),
    ...(sum("n_excluded") ? [`${perToken("n_excluded")} excluded per token`] : []),
    ...(view.run.error && choice.finish === null ? ["the answer failed: later tokens were not scored"] : []),
    ...(mute ? [`${plural(mute, "concept")} can never fire (threshold 1 or not set)`] : []),
    ...(toldOf(view) ? [toldOf(view)] : []),
  ].join(" · ");
}

