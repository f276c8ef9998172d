// The page of `probemon serve`: what is shown, and which part draws it.
//
// Events and records (server.js) go into the state (state.js); the place (link.js) says which of it is shown; each part
// draws what it shows of the two, at most once a frame, and leaves what has not changed.

import { $ } from "./elements.js";
import { tips } from "./tip.js";
import { drawChat } from "./chat.js";
import { controlCompare } from "./compare.js";
import { compose } from "./compose.js";
import { digest } from "./digest.js";
import { rove } from "./focus.js";
import { drawLanes } from "./lanes.js";
import { hashOf, NOWHERE, readPlace } from "./link.js";
import { drawNow } from "./now.js";
import { controlReplay, drawReplay } from "./replay.js";
import { drawRules, editRules, loadRules } from "./rules.js";
import { drawRuns } from "./runs.js";
import { linesOf } from "./said.js";
import { follows, isOffered, keepToken, ownRequests, setFollows, takeOffered, takeToken } from "./session.js";
import { connect } from "./server.js";
import { newState, newestFirst } from "./state.js";
import { drawTree, walkTree } from "./tree.js";
import { walkTokens } from "./tokens.js";
import { walkLanes } from "./walk_lanes.js";
import { controlZoom, keepInside } from "./zoom.js";

const state = newState();
const app = {
  state,
  place: { ...NOWHERE },
  get follow() {
    return follows();
  },
  set follow(whether) {
    setFollows(whether);
  },
  own: ownRequests(),
  others: new Set(), // requests of other programs since this page was opened, or stopped to follow new answers
  hoverAt: null,
  replay: null,
  rules: loadRules(),
  asking: null,
  editing: null, // the messages before the one that is edited
  allLanes: false,
  allRows: false,
  zoom: null, // the window of tokens that the lanes show
  gone: null,

  run: () => state.runs.get(app.place.answer) ?? null,
  load: (id) => server.load(id),

  /**
   * What is shown: a choice of a run with its digest; `at` is the index of the token that the panels tell of. Null
   * while there is none.
   */
  view() {
    const run = app.run();
    const i = app.place.choice;
    const choice = run?.choices[i];
    const pack = packOf(run);
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

  /** The answer that is compared with the one shown, as a view without a pinned token; null while there is none. */
  other() {
    const run = state.runs.get(app.place.other) ?? null;
    const i = app.place.otherChoice;
    const choice = run?.choices[i];
    const pack = packOf(run);
    if (!choice || pack === null) return null;
    const upto = choice.tokens.length - 1;
    const concept = pack.byId.get(app.place.concept) ?? null;
    return {
      run,
      i,
      choice,
      pack,
      upto,
      digest: digest(choice, pack, upto),
      pinned: null,
      hovered: false,
      concept,
      at: null,
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
    if (token !== null) keepInside(app, i);
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
  /** Ask for a token; nothing else is offered without one. `why`: what is wrong with the one there is. */
  signIn(why = "") {
    if (isOffered()) return takeKey(true);
    $("sign-in").hidden = false;
    $("sign-in-why").hidden = !why;
    $("sign-in-why").textContent = why;
    document.body.dataset.access = "none";
    $("token").focus();
  },
  signedIn() {
    $("sign-in").hidden = true;
    delete document.body.dataset.access;
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

const packOf = (run) => run?.pack ?? state.pack;

/** The newest token of which something is known. */
function newestSeen({ tokens }, upto) {
  for (let i = upto; i >= 0; i--) if (!tokens[i].unseen) return i;
  return upto >= 0 ? upto : null;
}

function drawAll() {
  const view = app.view();
  server.drawHead();
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
    app.zoom = null;
    app.allRows = false;
  }
  for (const id of [app.place.answer, app.place.other]) if (id !== null && !state.runs.get(id)?.whole) server.load(id);
  app.draw();
}

// -- all of it -----------------------------------------------------------------------------------

/** Ask whether to use the key that a link brought, where there is one. */
function offerKey() {
  $("other-key").hidden = !isOffered();
}

function takeKey(whether) {
  takeOffered(whether);
  if (whether) location.reload(); // nothing that the other key showed stays
  else {
    offerKey();
    $("ask").focus();
  }
}

const replays = controlReplay(app);
takeToken();
offerKey();
for (const [id, viewOf] of [
  ["answer", app.view],
  ["other", app.other],
])
  tips($("tip"), $(id), ".tok:not(.plain):not(.later)", (node) => {
    const view = viewOf();
    return view === null ? [] : linesOf(view, node.at[0]);
  });
const sayOther = (i) => {
  $("said").textContent = linesOf(app.other(), i).join(". ");
};
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
walkTokens($("other"), { hover: () => {}, pin: () => {}, say: sayOther });
controlZoom(app);
controlCompare(app);
for (const id of ["now-rows", "lanes", "runs"]) rove($(id));
rove($("examples"), "button");
new ResizeObserver(() => app.draw()).observe($("thread"));
$("unpin").addEventListener("click", () =>
  app.go({ ...app.place, concept: null, token: app.place.concept === null ? null : app.place.token }, true),
);
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("ask").focus();
});
$("help-open").addEventListener("click", () => $("help").showModal());
$("lanes-more").addEventListener("click", () => {
  app.allLanes = !app.allLanes;
  app.draw();
});
$("follow").addEventListener("click", () => {
  app.follow = !app.follow;
  app.others.clear();
  const [newest] = newestFirst(state).filter((run) => !run.pack);
  if (app.follow && newest) app.go({ answer: newest.id });
  app.draw();
});
$("key-take").addEventListener("click", () => takeKey(true));
$("key-leave").addEventListener("click", () => takeKey(false));
$("again").addEventListener("click", () => server.again());
$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken($("token").value);
  $("token").value = "";
  server.again();
});
for (const tab of document.querySelectorAll("#tabs button")) {
  tab.addEventListener("click", () => {
    document.body.dataset.tab = tab.value;
    for (const other of document.querySelectorAll("#tabs button"))
      other.setAttribute("aria-pressed", String(other === tab));
    app.draw();
  });
}
addEventListener("popstate", () => {
  app.follow = false; // its user has chosen what to read
  arrive();
});
addEventListener("hashchange", () => {
  if (!takeToken()) return; // any other change is a popstate, too
  offerKey();
  if (!isOffered()) server.again();
  arrive();
});
// A link leads to its answer; only a page that is loaded again goes on to the next.
if (location.hash.length > 1 && performance.getEntriesByType("navigation")[0].type !== "reload") app.follow = false;
$("address").textContent = `${location.origin}/v1`;
const server = connect(app);
arrive();
document.documentElement.dataset.ready = "true";
