// The page of `probemon serve`: what is shown, and which part draws it.
//
// Events and records go into the state (state.js); the place (link.js) says which of it is shown; each part draws what
// it shows of the two,
// at most once a frame, and leaves what has not changed.

import { $ } from "./elements.js";
import { hierarchyOf } from "./hierarchy.js";
import { tips } from "./tip.js";
import { count, plural } from "./words.js";
import { getPack, getRun, getRuns } from "./api.js";
import { compose, drawChat } from "./chat.js";
import { digest, readPack } from "./digest.js";
import { follow } from "./events.js";
import { clip } from "./harmless.js";
import { drawLanes, walkLanes } from "./lanes.js";
import { hashOf, NOWHERE, readPlace } from "./link.js";
import { drawNow } from "./now.js";
import { controlReplay, drawReplay } from "./replay.js";
import { drawRules, editRules, loadRules } from "./rules.js";
import { drawRuns } from "./runs.js";
import { linesOf } from "./said.js";
import { keepToken, takeToken } from "./session.js";
import { apply, isRunning, merge, mergeList, newState, newestFirst } from "./state.js";
import { drawTree, walkTree } from "./tree.js";
import { walkTokens } from "./tokens.js";

const NOTICE = 10_000; // milliseconds
const state = newState();
const app = {
  state,
  place: { ...NOWHERE },
  follow: true,
  hoverAt: null,
  replay: null,
  rules: loadRules(),
  asking: null,
  allLanes: false,
  gone: null,

  run: () => state.runs.get(app.place.answer) ?? null,

  /**
   * What is shown: a choice of a run with its digest; `at` is the index of the token that the panels tell of. Null
   * while there is none.
   */
  view() {
    const run = app.run();
    const i = app.place.choice;
    const choice = run?.choices[i];
    const pack = run?.pack ?? state.pack;
    if (!choice || pack === null) return null;
    const last = choice.tokens.length - 1;
    const upto = app.replay === null ? last : Math.min(app.replay.upto, last);
    const told = digest(choice, pack, upto);
    const pinned =
      app.place.token === null ? -1 : choice.tokens.findIndex(({ position }) => position === app.place.token);
    const hovered = app.hoverAt !== null && app.hoverAt <= upto;
    return {
      run,
      i,
      choice,
      pack,
      upto,
      digest: told,
      pinned: pinned < 0 ? null : pinned,
      hovered,
      concept: pack.byId.get(app.place.concept) ?? null,
      at: hovered ? app.hoverAt : pinned >= 0 && pinned <= upto ? pinned : newestSeen(choice, upto),
    };
  },

  go(place, replace = false) {
    const to = hashOf({ ...NOWHERE, ...place });
    if (to === (location.hash || "#")) return;
    if (replace) history.replaceState(null, "", to);
    else history.pushState(null, "", to);
    arrive();
  },
  /** Pin a token of the shown choice by its index; pinning it again, or null, takes the pin away. */
  pin(i) {
    const view = app.view();
    if (view === null) return;
    const token = i === null || i === view.pinned ? null : view.choice.tokens[i].position;
    app.hoverAt = null;
    if (token !== null) app.follow = false;
    app.go({ ...app.place, token }, true);
  },
  pinAt(i) {
    if (app.view()?.pinned !== i) app.pin(i);
  },
  hover(i) {
    if (app.hoverAt !== i) {
      app.hoverAt = i;
      app.draw();
    }
  },
  /** Colour one concept alone; choosing it again colours all. */
  choose(c) {
    const view = app.view();
    const { id } = view.pack.concepts[c];
    app.go({ ...app.place, concept: app.place.concept === id ? null : id }, true);
  },
  /** Tell of something that went wrong, for `ms` milliseconds or until something else is told; "" takes it away. */
  complain(text, ms = null) {
    clearTimeout(app.notice);
    $("complaint").textContent = text;
    $("complaint").hidden = !text;
    if (ms !== null) app.notice = setTimeout(() => app.complain(""), ms);
  },
  signIn() {
    $("sign-in").hidden = false;
  },

  draw() {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      drawAll();
    });
  },
};
let due = false;

/** The newest token of which something is known. */
function newestSeen({ tokens }, upto) {
  for (let i = upto; i >= 0; i--) if (!tokens[i].unseen) return i;
  return upto >= 0 ? upto : null;
}

function drawAll() {
  const view = app.view();
  drawHead();
  drawChat(app, view);
  drawNow(app, view);
  drawLanes(app, view);
  drawTree(app, view);
  drawRules(app, view);
  drawRuns(app);
  drawReplay(app, view);
}

// -- the place -----------------------------------------------------------------------------------

function arrive() {
  const before = app.place;
  app.place = readPlace(location.hash);
  if (before.answer !== app.place.answer || before.choice !== app.place.choice) {
    replays.stop();
    app.hoverAt = null;
    app.gone = null;
  }
  const run = app.run();
  if (app.place.answer !== null && (run === null || !run.whole)) load(app.place.answer);
  app.draw();
}

async function load(id) {
  try {
    merge(state, await getRun(id));
    app.gone = null;
  } catch (error) {
    if (error.status === 401) app.signIn();
    else if (app.place.answer === id && !app.run()?.whole)
      app.gone = `This answer cannot be shown: ${clip(error.message, 300)}`;
  }
  app.draw();
}

// -- the server ----------------------------------------------------------------------------------

/** What the server keeps: the list, and whole the runs that are shown or go on. */
async function sync() {
  try {
    if (state.pack === null) state.pack = readPack(await getPack(), hierarchyOf);
    mergeList(state, await getRuns());
    const wanted = newestFirst(state).filter((run) => !run.pack && (isRunning(run) || run.id === app.place.answer));
    await Promise.all(wanted.map(({ id }) => load(id)));
    const [newest] = newestFirst(state);
    if (app.place.answer === null && app.follow && newest && isRunning(newest)) app.go({ answer: newest.id }, true);
  } catch (error) {
    if (error.status === 401) app.signIn();
    else app.complain(`The server did not answer: ${clip(error.message, 300)}`);
  }
  app.draw();
}

function onEvent(name, data) {
  const id = apply(state, name, data);
  if (name === "hello") {
    if (state.restarted) stream.forget();
    sync();
  } else if (name === "gap") {
    app.complain(
      `${plural(data.n_dropped, "event")} did not reach this page. What they told is fetched again.`,
      NOTICE,
    );
    sync();
  } else if (name === "begin" && app.follow && app.asking?.id == null) app.go({ answer: id }, true);
  if (id !== null && !state.runs.get(id).whole && name !== "begin") load(id); // it had begun before this page was there
  app.draw();
}

const connection = { state: "waiting", wait: 0 };
function onState(name, wait) {
  Object.assign(connection, { state: name, wait });
  if (name === "refused") app.signIn();
  else if (name === "live") $("sign-in").hidden = true;
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
    waiting: connection.wait ? `away, tries again in ${Math.ceil(connection.wait / 1000)} s` : "connecting",
    refused: "no access",
  };
  $("connection").textContent = words[connection.state];
  $("connection").className = `connection ${connection.state}`;
  $("again").hidden = connection.state !== "waiting" || !connection.wait;
}

// -- all of it -----------------------------------------------------------------------------------

const replays = controlReplay(app);
takeToken();
tips($("tip"), $("answer"), ".tok:not(.plain):not(.later)", (node) => {
  const view = app.view();
  return view === null ? [] : linesOf(view, node.at[0]);
});
walkTokens($("answer"), {
  hover: app.hover,
  pin: app.pin,
  say: (i) => {
    $("said").textContent = linesOf(app.view(), i).join(". ");
  },
});
walkLanes(app);
walkTree(app);
editRules(app);
compose(app);
$("unpin").addEventListener("click", () => app.go({ ...app.place, token: null, concept: null }, true));
$("lanes-more").addEventListener("click", () => {
  app.allLanes = !app.allLanes;
  app.draw();
});
$("follow").addEventListener("click", () => {
  app.follow = true;
  const [newest] = newestFirst(state).filter((run) => !run.pack);
  if (newest) app.go({ answer: newest.id });
  app.draw();
});
$("again").addEventListener("click", () => stream.again());
$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken($("token").value);
  $("token").value = "";
  stream.again();
  sync();
});
for (const tab of document.querySelectorAll("#tabs button")) {
  tab.addEventListener("click", () => {
    document.body.dataset.tab = tab.value;
    for (const other of document.querySelectorAll("#tabs button"))
      other.setAttribute("aria-pressed", String(other === tab));
    app.draw();
  });
}
addEventListener("popstate", arrive);
addEventListener("hashchange", () => {
  if (takeToken()) {
    stream.again();
    sync();
    arrive();
  }
}); // any other change is a popstate, too
if (location.hash.length > 1) app.follow = false;
$("address").textContent = `${location.origin}/v1`;
arrive();
const stream = follow({ event: onEvent, state: onState });
document.documentElement.dataset.ready = "true";
