// What comes from the server: its events, and what is fetched besides, into the state.
//
//   const server = connect(app);
//   server.load(id);                        // a whole run, whatever of it is known
//   server.again();                         // connect at once, with the secret that is known now
//
// Tokens name concepts by numbers, which mean something in the pack of their server alone. So nothing goes into the
// state that is not of the server that the state is of (`boot`).

import { $ } from "./elements.js";
import { pathsOf } from "./hierarchy.js";
import { count, plural } from "./words.js";
import { getPack, getRun, getRuns, onLate } from "./api.js";
import { readPack } from "./digest.js";
import { follow } from "./events.js";
import { clip } from "./harmless.js";
import { hasToken } from "./session.js";
import { apply, isRunning, meet, merge, mergeList, newestFirst } from "./state.js";

const NOTICE = 10_000; // milliseconds
const WRONG = "The server does not accept this token.";
const MAY_NOT = 'This key may not read the page\'s data: ask for a key with the role "read".';

export function connect(app) {
  const { state } = app;
  const connection = { state: "waiting", wait: 0 };

  /** Whether an answer is of the state's server. Else the stream is opened again, which tells of the new server. */
  function isOfThisServer(boot) {
    if (state.boot === null) meet(state, boot);
    if (state.boot === boot) return true;
    stream.cut();
    return false;
  }

  async function load(id) {
    try {
      const { boot, told } = await getRun(id);
      if (!isOfThisServer(boot)) return;
      merge(state, told);
      app.gone = null;
    } catch (error) {
      if (error.status === 401) app.signIn();
      else if (app.place.answer === id && !app.run()?.whole)
        app.gone = `This answer cannot be shown: ${clip(error.message, 300)}`;
    }
    app.draw();
  }

  /** What the server keeps: its pack, the list, and whole the runs that are shown or go on. */
  async function sync() {
    try {
      if (state.pack === null) {
        const { boot, told } = await getPack();
        if (!isOfThisServer(boot)) return;
        state.pack ??= readPack(told, pathsOf);
      }
      const known = [...state.runs.keys()];
      const { boot, told } = await getRuns();
      if (!isOfThisServer(boot)) return;
      mergeList(state, told.requests, known);
      const ofServer = newestFirst(state).filter((run) => !run.pack);
      const wanted = new Set(ofServer.filter(isRunning).map(({ id }) => id));
      if (app.place.answer !== null && !app.run()?.pack) wanted.add(app.place.answer);
      await Promise.all([...wanted].map(load));
      const [newest] = ofServer;
      const nothingElse = app.place.answer === null || app.run()?.before;
      if (nothingElse && app.follow && newest && isRunning(newest)) app.go({ answer: newest.id }, true);
    } catch (error) {
      if (error.status === 401) app.signIn();
      else {
        app.complain(`The server did not answer: ${clip(error.message, 300)}`);
        if (state.pack === null) stream.cut(); // nothing can be shown without it: all is tried again
      }
    }
    app.draw();
  }

  function onHello({ boot }) {
    if (meet(state, boot))
      app.complain(
        "The server was started again. Earlier answers stay on this page, with the concepts of their own pack.",
        NOTICE,
      );
    sync();
  }

  function onEvent(name, data) {
    const id = apply(state, name, data);
    if (name === "hello") onHello(data);
    else if (name === "gap") {
      app.complain(
        `${plural(data.n_dropped, "event")} did not reach this page. Their contents are fetched again.`,
        NOTICE,
      );
      sync();
    } else if (name === "begin" && app.follow && app.asking === null) app.go({ answer: id }, true);
    else if (name === "begin" && !app.follow) app.others.add(id);
    // Of a run that had begun before this page was there the beginning is fetched.
    if (id !== null && !state.runs.get(id).whole && name !== "begin") load(id);
    app.draw();
  }

  function onState(name, wait, status) {
    Object.assign(connection, { state: name, wait });
    if (name === "refused") app.signIn(status === 403 ? MAY_NOT : hasToken() ? WRONG : "");
    else if (name === "live") app.signedIn();
    app.draw();
  }

  function drawHead() {
    const { pack } = state;
    const running = [...state.runs.values()].filter((run) => run.whole && isRunning(run)).length;
    $("pack").textContent =
      pack === null
        ? ""
        : `${clip(pack.model, 60)} watched by ${clip(pack.pack, 60)}, ${count(pack.concepts.length)} concepts`;
    const words = {
      live: running ? `live, ${running} answering` : "live",
      waiting: connection.wait ? `disconnected, retry in ${Math.ceil(connection.wait / 1000)} s` : "connecting",
      refused: "no access",
    };
    $("connection").textContent = words[connection.state];
    $("connection").className = `connection ${connection.state}`;
    $("again").hidden = connection.state !== "waiting" || !connection.wait;
  }

  onLate((whether) => {
    $("late").hidden = !whether;
  });
  const stream = follow({ event: onEvent, state: onState });
  return { load, again: stream.again, drawHead };
}
