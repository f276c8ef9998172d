// The card of the chosen concept: what it is, where it fires in the answer, what it learned, how far to trust it.

import { $, el } from "./elements.js";
import { getConcept } from "./api.js";
import { refill } from "./focus.js";
import { clip } from "./harmless.js";
import { nameButton, tokenButton } from "./parts.js";
import { above, idOf, nameOf, numbered, right, strengthOf } from "./said.js";
import { count, percent, plural, score } from "./words.js";

const PLACES = 8;
const WORDS = 24;
const EXAMPLES = 6;
const SVG = "http://www.w3.org/2000/svg";
const fetched = new WeakMap(); // by pack, by concept: what the server says, or an Error

/** What the server says of a concept: fetched once, undefined until it is there. */
function detailsOf(app, { pack }, c) {
  if (!fetched.has(pack)) fetched.set(pack, new Map());
  const known = fetched.get(pack);
  if (!known.has(c)) {
    known.set(c, undefined);
    getConcept(c)
      .then(({ boot, told }) => {
        if (boot !== app.state.boot) throw new Error("the server was started again");
        known.set(c, told);
      })
      .catch((error) => {
        known.set(c, error);
        if (error.status === 401) app.signIn();
      })
      .finally(() => app.draw());
  }
  return known.get(c);
}

function placesOf(app, view, c) {
  const known = view.digest.concepts.get(c);
  if (!known) return ["It did not fire in this answer."];
  const shown = known.at.slice(0, PLACES);
  return [
    `Fires at ${plural(known.n, "token")}: `,
    ...shown.flatMap((i, k) => [k ? ", " : "", tokenButton(app, view, i, `at ${i}`)]),
    known.n > PLACES ? `, and ${known.n - PLACES} more` : "",
    ". ",
    known.peak > -Infinity
      ? `At its strongest (${strengthOf(view.pack, c, known.peak)}) at ${numbered(view.choice, known.peakAt)}.`
      : "",
  ];
}

/** How the concept scored on calibration text, with its threshold. */
function histogram({ low, width, counts }, threshold) {
  const most = Math.log1p(Math.max(...counts));
  const first = counts.findIndex((n) => n > 0);
  const last = counts.findLastIndex((n) => n > 0) + 1;
  const odds = threshold === null ? null : Math.log(threshold) - Math.log1p(-threshold);
  const end = odds === null || !Number.isFinite(odds) ? last : Math.max(last, Math.ceil((odds - low) / width) + 2);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `${first} 0 ${end - first} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  const draw = (kind, d) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", kind);
    path.setAttribute("d", d);
    svg.append(path);
  };
  draw(
    "counts",
    counts.map((n, k) => (n ? `M${k} 40v${((-38 * Math.log1p(n)) / most).toFixed(1)}h1V40z` : "")).join(""),
  );
  const at = odds === null ? null : (odds - low) / width;
  if (at !== null && at >= first && at <= end) draw("over", `M${at.toFixed(2)} 0h.4V40h-.4z`);
  const total = counts.reduce((a, b) => a + b, 0);
  const line = at === null ? "" : ", with the threshold";
  const said = `Scores of ${count(total)} tokens of ordinary text, low to high${line}`;
  return el(
    "figure",
    {},
    el("div", { class: "histogram", role: "img", "aria-label": said }, svg),
    el("figcaption", { class: "dim small" }, `${said} (heights are logarithmic). It fires to the right of the line.`),
  );
}

function learned(told) {
  const texts = told.examples.slice(0, EXAMPLES);
  return [
    el("h3", {}, "What it learned"),
    told.n_train !== null && el("p", {}, `From ${plural(told.n_train, "example")} of the concept.`),
    told.words.length > 0 &&
      el(
        "p",
        {},
        "Typical words: ",
        el(
          "bdi",
          {},
          told.words
            .slice(0, WORDS)
            .map((word) => clip(word, 40))
            .join(", "),
        ),
        ".",
      ),
    texts.length
      ? el("ul", { class: "samples" }, ...texts.map((text) => el("li", {}, el("bdi", {}, clip(text, 240)))))
      : el("p", { class: "dim" }, "This pack holds no example texts: those that trained it cannot be shown."),
  ];
}

function trusted(view, c, told) {
  const { threshold } = view.pack.concepts[c];
  const { false_alarms: alarms } = told;
  const most = alarms?.at_most ? "at most " : "";
  const rate = alarms && (alarms.rate < 0.001 ? `${(100 * alarms.rate).toPrecision(1)} %` : percent(alarms.rate));
  return [
    el("h3", {}, "How far to trust it"),
    el(
      "ul",
      { class: "facts" },
      el(
        "li",
        {},
        right(view.pack, c)
          ? `When it fires, it is ${right(view.pack, c)}.`
          : "How often it is right when it fires was not measured.",
      ),
      el(
        "li",
        {},
        alarms
          ? `False alarms: it fires at ${most}${rate} of ${count(alarms.n)} tokens of ordinary text.`
          : "False alarms on ordinary text were not measured for this concept.",
      ),
      told.auroc !== null &&
        el(
          "li",
          {},
          `Of two texts, one with the concept, it scores that one higher ${Math.round(100 * told.auroc)} times in 100.`,
        ),
      el(
        "li",
        {},
        threshold === null || threshold >= 1
          ? "It has no usable threshold, so it never fires by itself."
          : `Threshold: it fires when its score, between 0 and 1, is over ${score(threshold)}.`,
      ),
    ),
    told.scores && histogram(told.scores, threshold),
  ];
}

export function drawCard(app, view) {
  const { pack, concept: c, run } = view;
  const details = run.pack ? null : detailsOf(app, view, c);
  const told = details && !(details instanceof Error) ? details : null;
  const missing = run.pack
    ? "The pack of this answer is not the server's, so what the concept learned cannot be shown."
    : details instanceof Error
      ? `What the concept learned cannot be shown: ${clip(details.message, 200)}`
      : "Asking the server about the concept …";
  $("now-what").replaceChildren("one concept");
  const below = pack.children[c];
  refill(
    $("now-rows"),
    el(
      "li",
      { class: "card" },
      nameButton(app, view, c, idOf(pack, c)),
      above(pack, c) && el("p", { class: "dim small" }, `A kind of: ${above(pack, c)}`),
      told?.definition && el("p", {}, el("bdi", {}, clip(told.definition, 400))),
      told !== null &&
        told.synonyms.length > 1 &&
        el("p", { class: "dim small" }, `Also: ${told.synonyms.map((word) => clip(word, 40)).join(", ")}`),
      el("h3", {}, "In this answer"),
      el("p", {}, ...placesOf(app, view, c)),
      ...(told === null ? [el("p", { class: "dim" }, missing)] : [...learned(told), ...trusted(view, c, told)]),
      below.length > 0 &&
        el(
          "p",
          { class: "dim small" },
          `Narrower: ${below
            .slice(0, 12)
            .map((b) => nameOf(pack, b))
            .join(", ")}${below.length > 12 ? ", …" : ""}`,
        ),
    ),
  );
  $("now-last").replaceChildren();
}
