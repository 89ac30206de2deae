// A page loads this script first; its other scripts send their requests with `request`. A page whose user signs out asks for
// nothing more: the answer would be that nobody is signed in.

const leaving = new AbortController();
document.addEventListener("submit", (event) => {
  if (event.target.getAttribute("action") === "/logout") leaving.abort();
});

window.leaving = leaving.signal;
window.request = (path, signal = leaving.signal) =>
  fetch(path, { headers: { accept: "application/json" }, signal: AbortSignal.any([signal, leaving.signal]) });
