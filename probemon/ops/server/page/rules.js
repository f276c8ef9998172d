// Rules that go with what is asked from this page, edited; and the events of the answer that is shown.

import { $, el } from "./elements.js";
import { score } from "./words.js";
import { clip } from "./harmless.js";
import { cameOf, quoted, ruleOf } from "./said.js";
import { nMissing } from "./state.js";

const NAME = "probemon-rules";
const OFFERED = 40;

// The fields that have an input of their own; the server's schema of a rule says what others there are.
const DRAWN = ["concept", "all_of", "above", "for_tokens", "aggregate", "action"];

const isRule = (rule) =>
  rule !== null &&
  typeof rule === "object" &&
  typeof rule.concept === "string" &&
  typeof (rule.above ?? 0) === "number" &&
  typeof (rule.for_tokens ?? 1) === "number" &&
  ["record", "stop"].includes(rule.action ?? "record") &&
  Object.values(rule).every((value) => value === null || ["string", "number"].includes(typeof value));

/** The rules that were kept. What one leaves out is as the server takes it; what is no rule is left out. */
export function loadRules() {
  try {
    return JSON.parse(localStorage.getItem(NAME) ?? "[]")
      .filter(isRule)
      .map((rule) => ({ above: null, for_tokens: 1, aggregate: null, action: "record", ...rule }));
  } catch {
    return [];
  }
}

/** The rules as a request bears them. */
export const asked = (rules) => rules.map((rule) => ({ ...rule }));

function inWords(rule) {
  const { concept, above, for_tokens, aggregate, action } = rule;
  const what = aggregate ? `${clip(concept, 60)}, ${clip(aggregate, 20)}` : clip(concept, 60);
  const level = above === null ? "its threshold" : above;
  const streak = for_tokens > 1 ? ` for ${for_tokens} tokens` : "";
  const more = Object.entries(rule)
    .filter(([name]) => !DRAWN.includes(name))
    .map(([name, value]) => `, ${name.replaceAll("_", " ")} ${clip(String(value), 20)}`);
  return `${action === "stop" ? "Stop" : "Record"} when ${what} is over ${level}${streak}${more.join("")}`;
}

/** Inputs for the fields of a rule that the page does not draw itself. */
function drawMore(properties) {
  const others = Object.entries(properties ?? {}).filter(([name]) => !DRAWN.includes(name));
  $("rule-more").replaceChildren(
    ...others.map(([name, about]) => {
      const input = about.enum
        ? el("select", { "data-field": name }, ...about.enum.map((value) => el("option", { value }, value)))
        : el("input", { "data-field": name, type: about.type === "string" ? "text" : "number" });
      return el("label", { title: about.description }, `${name[0].toUpperCase()}${name.slice(1).replaceAll("_", " ")} `, input);
    }),
  );
}

/** What was chosen of these, but for what is the default. */
function moreFields(properties) {
  const given = [...$("rule-more").querySelectorAll("[data-field]")].map((input) => [
    input.dataset.field,
    input.type === "number" ? (input.value === "" ? "" : Number(input.value)) : input.value,
  ]);
  return Object.fromEntries(given.filter(([name, value]) => value !== "" && value !== properties[name].default));
}

function change(app, rules) {
  app.rules = rules;
  localStorage.setItem(NAME, JSON.stringify(rules));
  app.draw();
}

export function drawRules(app, view) {
  const list = $("rules");
  if (list.pack !== app.state.pack) {
    list.pack = app.state.pack;
    offer(app);
    drawMore(app.state.pack?.rule?.properties);
  }
  const key = JSON.stringify(app.rules);
  if (list.key !== key) {
    list.key = key;
    const remove = (i) => {
      change(
        app,
        app.rules.filter((_, k) => k !== i),
      );
      $("rule-concept").focus();
    };
    list.replaceChildren(
      ...app.rules.map((rule, i) =>
        el(
          "li",
          {},
          el("span", { class: `sign ${rule.action}`, "aria-hidden": "true" }, rule.action === "stop" ? "■" : "▲"),
          el("bdi", {}, inWords(rule)),
          el(
            "button",
            { class: "plain", type: "button", "aria-label": `Remove: ${inWords(rule)}`, click: () => remove(i) },
            "Remove",
          ),
        ),
      ),
    );
    if (!app.rules.length)
      list.replaceChildren(
        el("li", { class: "dim" }, "None. A rule that you add applies to what you ask on this page next."),
      );
  }
  drawEvents(app, view);
}

function drawEvents(app, view) {
  const box = $("events");
  const events = view === null ? [] : view.choice.events;
  const missing = view !== null && nMissing(view.choice) > 0;
  const key =
    view === null
      ? ""
      : JSON.stringify([
          app.place.answer,
          app.place.choice,
          events,
          missing,
          view.choice.tokens.length ? view.choice.tokens[0].position : 0,
        ]);
  $("events-count").textContent = events.length ? String(events.length) : "";
  if (box.key === key) return;
  box.key = key;
  box.replaceChildren(
    ...events.map((event) => {
      const i = view.choice.tokens.findIndex(({ position }) => position === event.position);
      const at = i < 0 ? `token ${event.position}` : `${quoted(view.choice.tokens[i])} ${event.position}`;
      return el(
        "li",
        {},
        el("span", { class: `sign ${event.action}`, "aria-hidden": "true" }, event.action === "stop" ? "■" : "▲"),
        el(
          "span",
          {},
          el("bdi", {}, ruleOf(event)),
          ` ${cameOf(event)}`,
          event.blind ? "" : `: ${score(event.score)} over ${score(event.threshold)}`,
          event.for_tokens > 1 && !event.blind ? ` for ${event.for_tokens} tokens` : "",
        ),
        i < 0
          ? el("span", { class: "dim" }, at)
          : el("button", { class: "since", type: "button", click: () => app.pin(i) }, at),
      );
    }),
  );
  if (!events.length)
    box.replaceChildren(
      el(
        "li",
        { class: "dim" },
        missing
          ? "No rule was met at the tokens that reached this page. Others did not reach it."
          : "No rule was met in this answer.",
      ),
    );
}

/** Concepts whose id or name holds what was typed, offered while it is typed. */
function offer(app) {
  const typed = $("rule-concept").value.trim().toLowerCase();
  const { pack } = app.state;
  if (pack === null) {
    $("rule-concepts").replaceChildren();
    $("rule-above").placeholder = "its threshold";
    return;
  }
  const found = pack.concepts
    .filter(({ id, name }) => id.toLowerCase().includes(typed) || name.toLowerCase().includes(typed))
    .slice(0, OFFERED);
  $("rule-concepts").replaceChildren(...found.map(({ id, name }) => el("option", { value: id }, clip(name, 60))));
  const exact = pack.concepts.find(({ id, name }) => id.toLowerCase() === typed || name.toLowerCase() === typed);
  $("rule-above").placeholder = exact
    ? exact.threshold === null
      ? "required"
      : `its threshold, ${score(exact.threshold)}`
    : "its threshold";
}

export function editRules(app) {
  $("rule-concept").addEventListener("input", () => offer(app));
  $("rule-concept").addEventListener("focus", () => offer(app));
  $("rule-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const concept = $("rule-concept").value.trim();
    if (!concept) return;
    const above = $("rule-above").value.trim();
    change(app, [
      ...app.rules,
      {
        concept,
        above: above === "" ? null : Number(above),
        for_tokens: Number($("rule-tokens").value) || 1,
        aggregate: $("rule-aggregate").value.trim() || null,
        action: $("rule-action").value,
        ...moreFields(app.state.pack?.rule?.properties ?? {}),
      },
    ]);
    for (const id of ["rule-concept", "rule-above", "rule-aggregate"]) $(id).value = "";
    $("rule-tokens").value = "1";
    $("rule-concept").focus();
  });
}
