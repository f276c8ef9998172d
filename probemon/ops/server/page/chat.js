// The conversation that is shown.

import { $, el } from "./elements.js";
import { drawCompare, settingsOf } from "./compare.js";
import { drawComposer, edit } from "./compose.js";
import { coverageOf } from "./coverage.js";
import { refill } from "./focus.js";
import { clip } from "./harmless.js";
import { drawLegend } from "./legend.js";
import { hashOf, NOWHERE } from "./link.js";
import { choiceIsMissing, whatIsMissing } from "./missing.js";
import { endingOf } from "./runs.js";
import { contained } from "./stacked.js";
import { answerOf, isRunning } from "./state.js";
import { drawTokens } from "./tokens.js";
import { plural } from "./words.js";

const NEAR_END = 60; // pixels
const OTHER = "Another program";
const ROLES = { user: "You", assistant: "Answer", system: "System", developer: "Developer", tool: "Tool" };
const textOf = (content) =>
  typeof content === "string" ? content : content === null || content === undefined ? "" : JSON.stringify(content);

function messageNode(app, run, message, i) {
  const known = message.role === "assistant" ? answerOf(app.state, run.messages, i) : null;
  return el(
    "article",
    { class: `message ${message.role in ROLES ? message.role : "other"}` },
    el(
      "h3",
      {},
      el("span", {}, message.role === "user" ? run.asker : (ROLES[message.role] ?? clip(message.role, 30))),
      known !== null &&
        el("a", { href: hashOf({ ...NOWHERE, answer: known.run.id, choice: known.i }) }, "its concepts"),
      run.editable &&
        message.role === "user" &&
        el("button", { class: "plain", type: "button", click: () => edit(app, run.messages, i) }, "Edit"),
    ),
    message.reasoning_content &&
      el("div", { class: "text thought", dir: "auto" }, ...contained(textOf(message.reasoning_content))),
    el("div", { class: "text", dir: "auto" }, ...contained(textOf(message.content))),
  );
}

function drawMessages(app, run) {
  const box = $("messages");
  const pending = app.asking !== null && app.asking.id === null ? app.asking.messages : null;
  const messages = pending ?? run?.messages ?? (run?.prompt ? [{ role: "user", content: run.prompt }] : []);
  const own = pending !== null || (run !== null && app.own.has(run.id));
  const asker = own ? ROLES.user : run?.pack && !run.before ? "User" : run?.key ? `Key ${clip(run.key, 40)}` : OTHER;
  const editable = pending === null && run !== null && run.kind === "chat" && app.own.has(run.id);
  const key = JSON.stringify([run?.id ?? null, asker, messages, app.state.runs.size, editable]);
  if (box.key === key) return;
  box.key = key;
  if (box.contains(document.activeElement)) $("thread").focus({ preventScroll: true }); // its link has led elsewhere
  box.replaceChildren(...messages.map((message, i) => messageNode(app, { messages, asker, editable }, message, i)));
}

/**
 * Where a reader begins who comes to an answer: at its pinned token, else where it was asked for; one that goes on is
 * followed.
 */
function scrollTo(app, run, view) {
  const pinned = view === null ? null : $("answer").querySelector(".pinned");
  const last = $("messages").lastElementChild;
  if (pinned) pinned.scrollIntoView({ block: "center" });
  else if (run === null && !app.asking) $("thread").scrollTop = 0;
  else if (run !== null && !isRunning(run) && last) $("thread").scrollTop = last.offsetTop - $("thread").offsetTop - 14;
  else $("thread").scrollTop = $("thread").scrollHeight;
}

export function drawChat(app, view) {
  const run = app.run();
  const thread = $("thread");
  const pending = app.asking !== null && app.asking.id === null;
  const atEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < NEAR_END;
  $("empty").hidden = run !== null || pending;
  drawMessages(app, run);
  $("answer-panel").hidden = !pending && (run === null || choiceIsMissing(app));
  $("answer-wait").hidden = !(pending || (run !== null && isRunning(run) && !view?.choice.tokens.length));
  $("answer-wait").textContent = pending ? "Waiting for the server" : "Waiting for the first token";
  const arrived = $("answer").run !== run || $("answer").choice !== view?.choice || (pending && !$("answer").pending);
  $("answer").pending = pending;
  if ($("answer").run !== run || $("answer").choice !== view?.choice) {
    $("answer").replaceChildren();
    Object.assign($("answer"), { run, choice: view?.choice, drawn: [] });
  }
  if (view !== null && !pending) drawTokens($("answer"), view);
  else if (pending) {
    $("answer").replaceChildren();
    $("answer").drawn = [];
  }
  drawFoot(app, run, view, pending);
  drawChoices(app, run);
  drawLegend(app, pending ? null : view);
  drawCompare(app, pending ? null : run);
  const appeared = drawGone(app, pending ? "" : (app.gone ?? whatIsMissing(app, view)));
  if (appeared) $("gone").scrollIntoView({ block: "center" });
  else if (arrived) scrollTo(app, run, view);
  else if (atEnd && app.follow && run !== null && isRunning(run) && app.hoverAt === null)
    thread.scrollTop = thread.scrollHeight;
  $("newest").hidden =
    run === null || !isRunning(run) || thread.scrollHeight - thread.scrollTop - thread.clientHeight < NEAR_END;
  const nOthers = pending ? 0 : [...app.others].filter((id) => !app.own.has(id)).length;
  $("follow").textContent = app.follow
    ? "Stop following"
    : nOthers
      ? `Follow new answers (${nOthers} by other programs)`
      : "Follow new answers";
  drawComposer(app, run);
}

/** Say what cannot be shown; return whether it was not said before. */
function drawGone(app, words) {
  const box = $("gone");
  box.hidden = !words;
  if (box.words === words) return false;
  box.words = words;
  const first =
    choiceIsMissing(app) && el("a", { href: hashOf({ ...NOWHERE, answer: app.place.answer }) }, "Show the first");
  box.replaceChildren(words, ...(words && first ? [" ", first] : []));
  return words !== "";
}

function drawFoot(app, run, view, pending) {
  const running = run !== null && isRunning(run);
  const ending = run === null || pending ? "" : endingOf(run, view?.i ?? app.place.choice);
  $("answer-state").textContent = pending || run === null ? "" : running && !ending ? "answering" : ending;
  $("answer-state").className =
    `state ${ending.startsWith("failed") ? "bad" : view?.choice.summary?.stopped_by ? "stopped" : ""}`;
  const before = run?.before ? `From before the restart, watched by ${clip(run.pack.pack, 60)} · ` : "";
  $("answer-coverage").textContent =
    view === null || pending ? "" : before + [settingsOf(run), coverageOf(view)].filter(Boolean).join(" · ");
  $("answer-actions").hidden = pending || view === null;
  $("again-answer").hidden = !(run !== null && run.kind === "chat" && app.own.has(run.id) && !running);
  const unlike = view?.choice.summary?.unlike;
  $("answer-unlike").hidden = !unlike || pending;
  $("answer-unlike").textContent = unlike ? clip(unlike, 300) : "";
}

function drawChoices(app, run) {
  const box = $("choices");
  const n = run === null ? 0 : Math.max(run.n, run.choices.length);
  const key = `${run?.id} ${n} ${app.place.choice}`;
  if (box.key === key) return;
  box.key = key;
  box.hidden = n < 2;
  refill(
    box,
    ...Array.from({ length: n }, (_, i) =>
      el(
        "a",
        {
          href: hashOf({ ...NOWHERE, answer: run.id, choice: i }),
          "data-stop": `${run.id} ${i}`,
          "aria-current": i === app.place.choice ? "true" : undefined,
        },
        `${i + 1}`,
      ),
    ),
  );
}
