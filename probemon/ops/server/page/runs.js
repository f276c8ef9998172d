// The list of requests that the server knows of, its own and those of other clients.

import { $, el } from "./elements.js";
import { refill } from "./focus.js";
import { clip } from "./harmless.js";
import { hashOf, NOWHERE } from "./link.js";
import { ruleOf, stoppedBy } from "./said.js";
import { isRunning, newestFirst } from "./state.js";

/** What was asked, in a line. */
export function askedOf(run) {
  const users = (run.messages ?? []).filter(({ role }) => role === "user");
  const last = (users.length ? users : (run.messages ?? [])).at(-1)?.content;
  const text =
    typeof last === "string"
      ? last
      : last
        ? JSON.stringify(last)
        : typeof run.prompt === "string"
          ? run.prompt
          : run.prompt
            ? JSON.stringify(run.prompt)
            : run.excerpt;
  return clip(text.trim() || "(nothing)", 120);
}

/** How an answer ended, in a word or two; "" while it runs. */
export function endingOf(run, i = 0) {
  const finish = run.choices[i]?.finish ?? null;
  // Other answers of the request may have ended well before.
  if (run.error !== null && (finish === null || finish === "error")) return `failed: ${clip(run.error, 200)}`;
  if (finish === null && run.choices.some((choice) => choice.finish === "cancelled")) return "cancelled";
  const stopped = run.choices[i]?.summary?.stopped_by;
  if (stopped) return stoppedBy(stopped, "a rule: ");
  return (
    {
      stop: "complete",
      length: "reached its token limit",
      cancelled: "cancelled",
      content_filter: "stopped: text that was not checked is withheld",
      error: "failed",
    }[finish] ?? (finish !== null ? clip(finish, 60) : run.pack ? "its end did not reach this page" : "")
  );
}

/** Who asked, in a few words. */
export function askerOf(app, run) {
  if (app.own.has(run.id)) return "asked here";
  return run.key ? `asked with key ${clip(run.key, 40)}` : run.created ? "another program asked" : "";
}

export const clock = (created) =>
  new Date(1000 * created).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

/** How a request ended, in a word or two; also of one that this page knows from the server's list alone. */
function outcomeOf(run) {
  const { listed, choices, whole } = run;
  const reasons = whole ? choices.map(({ finish }) => finish) : (listed?.finish_reasons ?? []);
  const stop = whole ? choices.find(({ summary }) => summary?.stopped_by)?.summary.stopped_by : null;
  const name = stop ? ruleOf(stop) : listed?.stopped_by && clip(listed.stopped_by, 60);
  const nMet = whole ? choices.reduce((n, { events }) => n + events.length, 0) : (listed?.n_events ?? 0);
  if (run.error !== null || reasons.includes("error")) return "failed";
  if (reasons.includes("cancelled")) return "cancelled";
  if (name) return `stopped by ${name}`;
  return nMet ? "a rule was met" : "";
}

export function drawRuns(app) {
  const runs = newestFirst(app.state);
  const box = $("runs");
  const told = runs.map((run) => {
    return {
      run,
      more: [
        run.created ? clock(run.created) : "saved",
        askerOf(app, run),
        run.before ? "from before the restart" : "",
        isRunning(run) ? "running" : outcomeOf(run),
      ]
        .filter(Boolean)
        .join(" · "),
    };
  });
  const key = JSON.stringify([app.place.answer, told.map(({ run, more }) => [run.id, askedOf(run), more])]);
  $("runs-count").textContent = String(runs.length);
  if (box.key === key) return;
  box.key = key;
  refill(
    box,
    ...told.map(({ run, more }) =>
      el(
        "li",
        {},
        el(
          "a",
          {
            href: hashOf({ ...NOWHERE, answer: run.id }),
            "data-stop": run.id,
            "aria-current": run.id === app.place.answer ? "true" : undefined,
          },
          el("bdi", {}, askedOf(run)),
          el("span", { class: "dim" }, more),
        ),
      ),
    ),
  );
  if (!runs.length) box.replaceChildren(el("li", { class: "dim" }, "No requests yet."));
}
