// The field for a concept of a rule: it offers the pack's names, and says at once that there is no such concept.

import { $, el } from "./elements.js";
import { clip } from "./harmless.js";
import { above, idOf, nameOf } from "./said.js";
import { plural, score } from "./words.js";

const OFFERED = 40;
const NEAR = 3;
const MOST = 5;

const matches = (pattern, text) =>
  new RegExp(
    `^${pattern
      .split("*")
      .map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"))
      .join(".*")}$`,
    "u",
  ).test(text);

/** The concepts that hold what was typed, those that begin with it first. */
function holding(pack, typed) {
  const wanted = typed.toLowerCase();
  const begins = ({ id, name }) => id.toLowerCase().startsWith(wanted) || name.toLowerCase().startsWith(wanted);
  const holds = ({ id, name }) => id.toLowerCase().includes(wanted) || name.toLowerCase().includes(wanted);
  const found = [...pack.concepts.keys()].filter((c) => holds(pack.concepts[c]));
  return [...found.filter((c) => begins(pack.concepts[c])), ...found.filter((c) => !begins(pack.concepts[c]))];
}

/** What was typed as a request names it: {concept, c}, c null of a pattern; or {error}. */
export function meantBy(pack, typed) {
  const exact = pack.byId.get(typed);
  if (exact !== undefined) return { concept: typed, c: exact };
  for (const same of [(name) => name === typed, (name) => name.toLowerCase() === typed.toLowerCase()]) {
    const named = [...pack.concepts.keys()].filter((c) => same(pack.concepts[c].name));
    if (named.length === 1) return { concept: pack.concepts[named[0]].id, c: named[0] };
    if (named.length)
      return {
        error: `${plural(named.length, "concept")} have this name: give ${named
          .slice(0, MOST)
          .map((c) => idOf(pack, c))
          .join(" or ")}.`,
      };
  }
  if (typed.includes("*")) {
    if (pack.concepts.some(({ id, name }) => matches(typed, id) || matches(typed, name)))
      return { concept: typed, c: null };
    return { error: `No concept of the pack fits “${clip(typed, 40)}”.` };
  }
  const near = holding(pack, typed).slice(0, NEAR);
  const hint = near.length ? ` Did you mean ${near.map((c) => nameOf(pack, c)).join(", or ")}?` : "";
  return { error: `The pack has no concept “${clip(typed, 40)}”.${hint}` };
}

export function tellError(words) {
  $("rule-error").textContent = words;
  $("rule-error").hidden = !words;
  $("rule-concept").setAttribute("aria-invalid", String(words !== ""));
}

/** Names that go with what was typed, offered while it is typed. */
export function offer({ state: { pack } }) {
  const typed = $("rule-concept").value.trim();
  if (pack === null) {
    $("rule-concepts").replaceChildren();
    $("rule-above").placeholder = "its threshold";
    return;
  }
  const unique = new Map();
  for (const { name } of pack.concepts) unique.set(name, (unique.get(name) ?? 0) + 1);
  const found = holding(pack, typed);
  $("rule-concepts").replaceChildren(
    ...found.slice(0, OFFERED).map((c) => {
      const { id, name } = pack.concepts[c];
      return el("option", { value: unique.get(name) === 1 ? name : id }, above(pack, c) || idOf(pack, c));
    }),
  );
  const meant = typed ? meantBy(pack, typed) : null;
  const exact = meant !== null && meant.c !== undefined && meant.c !== null ? pack.concepts[meant.c] : null;
  $("rule-above").placeholder = exact
    ? exact.threshold === null
      ? "required"
      : `its threshold, ${score(exact.threshold)}`
    : "its threshold";
  tellError(meant?.error && !found.length ? meant.error : "");
}

export function controlConceptField(app) {
  const field = $("rule-concept");
  field.addEventListener("input", () => offer(app));
  field.addEventListener("focus", () => offer(app));
  field.addEventListener("change", () => {
    const typed = field.value.trim();
    if (app.state.pack !== null) tellError(typed ? (meantBy(app.state.pack, typed).error ?? "") : "");
  });
}
