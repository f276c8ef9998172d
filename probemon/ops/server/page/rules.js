// The rules that the shown answer was asked with, and what became of them; and those of what is asked here next.

import { $, el } from "./elements.js";
import { score } from "./words.js";
import { controlConceptField, meantBy, offer, tellError } from "./concept_field.js";
import { refill, rove } from "./focus.js";
import { clip } from "./harmless.js";
import { cameOf, nameOf, numbered, ruleOf } from "./said.js";
import { isRunning, nMissing } from "./state.js";

const NAME = "probemon-rules";

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

/** A rule in a sentence, as the page or another client asked for it. */
function inWords(rule, pack) {
  const { concept, all_of: several, above = null, for_tokens: n = 1, aggregate, action } = rule;
  const named = (name) => {
    const c = pack?.byId.get(name);
    return c === undefined ? clip(String(name), 60) : nameOf(pack, c);
  };
  const names = Array.isArray(several) ? several : [concept].flat();
  const what = names.map(named).join(" and ");
  const level = above === null ? "its threshold" : above;
  const running = aggregate ? `, as ${clip(String(aggregate), 20)},` : "";
  const streak = n > 1 ? ` for ${n} tokens` : "";
  const more = Object.entries(rule)
    .filter(([name, value]) => !DRAWN.includes(name) && value !== null)
    .map(([name, value]) => `, ${name.replaceAll("_", " ")} ${clip(String(value), 20)}`);
  return `${action === "stop" ? "Stop" : "Record"} when ${what}${running} is over ${level}${streak}${more.join("")}`;
}

/** Inputs for the fields of a rule that the page does not draw itself. */
function drawMore(properties) {
  const others = Object.entries(properties ?? {}).filter(([name]) => !DRAWN.includes(name));
  $("rule-more").replaceChildren(
    ...others.map(([name, about]) => {
      const input = about.enum
        ? el("select", { "data-field": name }, ...about.enum.map((value) => el("option", { value }, value)))
        : el("input", { "data-field": name, type: about.type === "string" ? "text" : "number" });
      return el(
        "label",
        { title: about.description },
        `${name[0].toUpperCase()}${name.slice(1).replaceAll("_", " ")} `,
        input,
      );
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
  const key = JSON.stringify([app.rules, app.state.pack?.pack]);
  if (list.key !== key) {
    list.key = key;
    const remove = (i) => {
      const rules = app.rules.filter((_, k) => k !== i);
      change(app, rules);
      if (!rules.length) $("rule-add").focus();
    };
    refill(
      list,
      ...app.rules.map((rule, i) => {
        const words = inWords(rule, app.state.pack);
        return el(
          "li",
          {},
          sign(rule.action),
          el("bdi", {}, words),
          el(
            "button",
            {
              class: "plain",
              type: "button",
              "data-stop": `rule ${i}`,
              "aria-label": `Remove: ${words}`,
              click: () => remove(i),
            },
            "Remove",
          ),
        );
      }),
      ...(app.rules.length ? [] : [el("li", { class: "dim" }, "None.")]),
    );
  }
  drawEvents(app, view);
}

const sign = (action) => el("span", { class: `sign ${action}`, "aria-hidden": "true" }, action === "stop" ? "■" : "▲");

/** The rules that the answer's client asked for, in words. */
function rulesOf({ run, pack }) {
  const rules = run.options?.probemon?.rules;
  return Array.isArray(rules)
    ? rules.filter((rule) => rule !== null && typeof rule === "object").map((rule) => inWords(rule, pack))
    : [];
}

function eventItem(app, view, event) {
  const i = view.choice.tokens.findIndex(({ position }) => position === event.position);
  const at = i < 0 ? "at a token that is not shown" : numbered(view.choice, i);
  return el(
    "li",
    {},
    sign(event.action),
    el(
      "span",
      {},
      el("bdi", {}, ruleOf(event)),
      ` ${cameOf(event)}`,
      event.blind ? "" : `: score ${score(event.score)}, over ${score(event.threshold)}`,
      event.for_tokens > 1 && !event.blind ? ` for ${event.for_tokens} tokens` : "",
    ),
    i < 0
      ? el("span", { class: "dim" }, at)
      : el(
          "button",
          {
            class: "since",
            type: "button",
            "data-stop": `event ${event.position} ${event.concept}`,
            click: () => app.pin(i),
          },
          at,
        ),
  );
}

/** What is said of an answer with no event. */
function noEvent(view, rules) {
  if (nMissing(view.choice) > 0)
    return "No rule was met at the tokens that reached this page. Others did not reach it.";
  const yet = isRunning(view.run) ? " yet" : "";
  return rules.length ? `${rules.length > 1 ? "None of them" : "It"} was not met${yet}.` : `No rule was met${yet}.`;
}

function drawEvents(app, view) {
  const box = $("events");
  $("answer-rules").hidden = view === null;
  if (view === null) return;
  const { events } = view.choice;
  const rules = rulesOf(view);
  const key = JSON.stringify([
    app.place.answer,
    app.place.choice,
    events,
    rules,
    nMissing(view.choice) > 0,
    isRunning(view.run),
    view.choice.tokens.length ? view.choice.tokens[0].position : 0,
  ]);
  if (box.key === key) return;
  box.key = key;
  $("rules-asked").textContent = rules.length
    ? `It was asked with ${rules.length > 1 ? "these rules" : "this rule"}: ${rules.join("; ")}.`
    : "It was asked without rules of its own.";
  refill(
    box,
    ...events.map((event) => eventItem(app, view, event)),
    ...(events.length ? [] : [el("li", { class: "dim" }, noEvent(view, rules))]),
  );
}

export function editRules(app) {
  controlConceptField(app);
  rove($("rules"));
  rove($("events"));
  $("rule-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const typed = $("rule-concept").value.trim();
    if (!typed) return;
    const meant = app.state.pack === null ? { concept: typed } : meantBy(app.state.pack, typed);
    if (meant.error) {
      tellError(meant.error);
      $("rule-concept").focus();
      return;
    }
    const above = $("rule-above").value.trim();
    change(app, [
      ...app.rules,
      {
        concept: meant.concept,
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
