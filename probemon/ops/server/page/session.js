// The server's secret: taken from the address that `probemon serve` printed, kept for this tab alone, sent in a header,
// never in an address.

const NAME = "probemon-token";
const ASKED = "probemon-asked";
const FOLLOWS = "probemon-follow";
const MOST_ASKED = 500;

let offered = null;

/**
 * Move the secret from a hash like `#token=...` into the session, and return whether there was one. It does not replace
 * another: then it is offered, until `takeOffered()`.
 */
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1));
  const token = given.get("token");
  if (!token || given.get("answer")) return false;
  history.replaceState(null, "", location.pathname + location.search);
  if (hasToken() && sessionStorage.getItem(NAME) !== token) offered = token;
  else keepToken(token);
  return true;
}

export const isOffered = () => offered !== null;

/** Sign in with the secret that a link brought, or else forget it. */
export function takeOffered(whether) {
  if (whether) keepToken(offered);
  offered = null;
}

/** Keep a secret: the token, or the whole address or line in which it stands. */
export function keepToken(text) {
  const token = text.match(/#token=([^\s&]+)/)?.[1] ?? text.trim();
  sessionStorage.setItem(NAME, token);
}

export const hasToken = () => sessionStorage.getItem(NAME) !== null;

/** The ids of the requests that this tab has sent, and one more that it remembers over a reload. */
export function ownRequests() {
  const kept = JSON.parse(sessionStorage.getItem(ASKED) ?? "[]");
  const own = new Set(kept);
  return {
    has: (id) => own.has(id),
    add(id) {
      own.add(id);
      sessionStorage.setItem(ASKED, JSON.stringify([...own].slice(-MOST_ASKED)));
    },
  };
}

/** Whether this tab goes to each new answer, whoever asks for it: where its user chose so, also after a reload. */
export const follows = () => sessionStorage.getItem(FOLLOWS) !== null;
export const setFollows = (whether) =>
  whether ? sessionStorage.setItem(FOLLOWS, "yes") : sessionStorage.removeItem(FOLLOWS);

export function headers(more = {}) {
  const token = sessionStorage.getItem(NAME);
  return token ? { Authorization: `Bearer ${token}`, ...more } : more;
}
