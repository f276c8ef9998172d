// The stream of all that the server's requests do. A connection that ends is opened again, from the event after the
// last one read. A page that nobody sees has none: browsers open six to a server, for all pages together.

import { readEvents, Refused, request } from "./api.js";
import { headers } from "./session.js";

const SILENCE = 45_000; // ms: a server sends at least a comment every few seconds
const MOST = 20_000;

/**
 * Follow the events for ever, while the page is in sight. `on.event(name, data)` is called for each, `on.state(name,
 * wait, status)` with "live" once they come, "waiting" with the milliseconds until the next attempt, and "refused"
 * where the secret is wrong or may not read them: then nothing is tried until `again()`, which connects at once.
 * `cut()` ends the connection like a server does.
 */
export function follow(on) {
  let last = null;
  let retry = 1000;
  let failures = 0;
  let wake = null;
  let cut = null;
  let atOnce = false;

  async function connect() {
    const control = new AbortController();
    cut = () => control.abort();
    let timer = null;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), SILENCE);
    };
    try {
      alive();
      const response = await request("/v1/probemon/events", {
        headers: headers(
          last === null ? { Accept: "text/event-stream" } : { Accept: "text/event-stream", "Last-Event-ID": last },
        ),
        signal: control.signal,
        cache: "no-store",
      });
      if (!response.ok) {
        response.body?.cancel();
        throw new Refused(response.status, response.statusText);
      }
      failures = 0;
      on.state("live", 0);
      const watched = response.body.pipeThrough(
        new TransformStream({
          transform(piece, to) {
            alive();
            to.enqueue(piece);
          },
        }),
      );
      for await (const { id, event, data, retry: pause } of readEvents(watched)) {
        if (/^\d+$/.test(pause ?? "")) retry = Math.min(MOST, Number(pause));
        const told = data === undefined ? null : JSON.parse(data);
        if (told !== null) on.event(event ?? "message", told);
        if (id !== undefined) last = id;
        else if (event === "hello") last = String(told.last_id); // also of another server, whose ids began anew
      }
    } finally {
      clearTimeout(timer);
    }
  }

  const pause = (ms) =>
    new Promise((resolve) => {
      const timer = ms === null ? null : setTimeout(resolve, ms);
      wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });

  const again = () => {
    atOnce = true;
    cut?.();
    wake?.();
  };
  document.addEventListener("visibilitychange", again);

  (async () => {
    for (;;) {
      atOnce = false;
      if (document.visibilityState === "hidden") {
        on.state("waiting", 0);
        await pause(null);
        continue;
      }
      let wait = retry;
      let status = null;
      try {
        await connect();
      } catch (error) {
        status = error.status ?? null;
        wait = error.status === 401 || error.status === 403 ? null : Math.min(MOST, retry * 2 ** failures++);
      }
      if (atOnce) continue;
      on.state(wait === null ? "refused" : "waiting", wait, status);
      await pause(wait);
    }
  })();
  return {
    again,
    cut: () => cut?.(),
  };
}
