// What is asked of the server, by fetch, since a header bears the secret.

import { headers } from "./session.js";

/** An answer that is not 2xx: `status`, and the server's own words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const LATE = 5000; // milliseconds
const late = new Set();
let tellLate = () => {};

/** Have `listener(whether)` hear whenever a request is without an answer for so long, and when none is any more. */
export function onLate(listener) {
  tellLate = listener;
}

/** `fetch`, which can wait for ever: a browser opens six connections to a server, and each stream holds one. */
export async function request(path, options) {
  const timer = setTimeout(() => {
    late.add(timer);
    tellLate(true);
  }, LATE);
  try {
    return await fetch(path, options);
  } finally {
    clearTimeout(timer);
    if (late.delete(timer)) tellLate(late.size > 0);
  }
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let message = text.slice(0, 300);
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? message;
  } catch {
    /* it is no JSON: its text is the message */
  }
  return new Refused(response.status, String(message || response.statusText || `status ${response.status}`));
}

/** What the server tells, and which server tells it: {boot, told}. */
async function getJson(path) {
  const response = await request(path, { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return { boot: response.headers.get("Probemon-Boot"), told: await response.json() };
}

export const getPack = () => getJson("/v1/probemon/pack");
export const getRuns = () => getJson("/v1/probemon/requests");
export const getRun = (id) => getJson(`/v1/probemon/requests/${encodeURIComponent(id)}`);
export const getConcept = (c) => getJson(`/v1/probemon/concepts/${c}`);

/**
 * Ask for a chat's answer and read it to its end. `begun(id)` is called as soon as the server has taken the request;
 * what the response brings goes into `told`: {text, reasoning, finish_reason, summary}. The tokens come by the events.
 */
export async function ask(body, signal, begun, told) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true }),
  });
  if (!response.ok) throw await refusal(response);
  let id = response.headers.get("Probemon-Request");
  if (id !== null) begun(id);
  for await (const { data } of readEvents(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, String(chunk.error.message ?? chunk.error));
    if (id === null && chunk.id) begun((id = chunk.id));
    const [choice] = chunk.choices;
    told.text += choice?.delta.content ?? "";
    told.reasoning += choice?.delta.reasoning_content ?? "";
    told.finish_reason ??= choice?.finish_reason ?? null;
    told.summary ??= choice?.delta.probemon_summary ?? null;
  }
  if (told.finish_reason === null) throw new Error("the answer broke off");
}

/** Server-sent events of a body: {id, event, data, retry}, as the standard says it. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let fields = {};
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (fields.data !== undefined || fields.retry !== undefined) yield fields;
          fields = {};
          continue;
        }
        const [, name, text] = line.match(/^([^:]*):? ?([^]*)$/);
        if (name === "data") fields.data = fields.data === undefined ? text : `${fields.data}\n${text}`;
        else if (["id", "event", "retry"].includes(name)) fields[name] = text;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
