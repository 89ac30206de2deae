// Keeps pages current and draws charts. Every page is complete without it.

const body = document.body;
const pageName = body.dataset.page;

// --- ages

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

function ago(seconds) {
  if (seconds < 2) return "just now";
  for (const [size, name] of UNITS) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${name} ago`;
  }
  return "just now";
}

// The time of day, with its date unless it is of today.
function clock(time, now) {
  if (time.toDateString() === now.toDateString()) return time.toLocaleTimeString([], { hourCycle: "h23" });
  return time.toLocaleString([], { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
}

function tellTimes(root = document) {
  const now = Date.now();
  for (const one of root.querySelectorAll("time[data-ago]")) {
    const text = ago((now - Date.parse(one.dateTime)) / 1000);
    if (one.textContent !== text) one.textContent = text;
  }
  for (const one of root.querySelectorAll("time[data-clock]")) {
    const text = clock(new Date(one.dateTime), new Date(now));
    if (one.textContent !== text) one.textContent = text;
  }
}

// --- live blocks

function put(blocks) {
  for (const [name, html] of Object.entries(blocks)) {
    const place = document.getElementById(`live-${name}`);
    if (!place) continue;
    const focused = place.contains(document.activeElement) ? document.activeElement : null;
    const mark = ["href", "name", "aria-label"].find((one) => focused?.hasAttribute(one));
    const again = mark && `[${mark}="${CSS.escape(focused.getAttribute(mark))}"]`;
    const scrolled = [...place.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    const ticked = [...place.querySelectorAll("input:checked")].map((one) => one.name);
    place.innerHTML = html;
    for (const one of place.querySelectorAll("input[type=checkbox]")) one.checked = ticked.includes(one.name);
    place.querySelectorAll(".scroll").forEach((one, i) => { one.scrollLeft = scrolled[i] ?? 0; });
    if (again) place.querySelector(again)?.focus({ preventScroll: true });
    tellTimes(place);
  }
  body.dispatchEvent(new CustomEvent("blocks", { detail: Object.keys(blocks) }));
}

function signedOut() {
  if (leaving.aborted) return;
  const fields = [...document.querySelectorAll("main textarea, main form[method=post] input[type=text]")];
  if (fields.some((one) => one.value !== one.defaultValue)) {
    lost("your session has ended. Copy what you typed, then load the page again to sign in.");
    return;
  }
  location.assign(`/login?ended=1&next=${encodeURIComponent(location.pathname + location.search)}`);
}

// --- whether what is shown is current: a banner and grey figures from the first sign that nobody answers

const SILENT_MS = 40000; // the server says something every 15 s
const RETRY_MS = 5000;
const banner = document.getElementById("not-live");
let heard = Date.now();

function live(how) {
  heard = Date.now();
  body.dataset.connection = how;
  banner.hidden = true;
}

function lost(why) {
  if (body.dataset.connection === "lost" && banner.dataset.why === why) return;
  body.dataset.connection = "lost";
  banner.dataset.why = why;
  const since = document.createElement("time");
  since.dateTime = new Date(heard).toISOString();
  since.dataset.clock = ""; // the next day it has its date
  banner.replaceChildren("Not live since ", since, `: ${why} The page shows the figures of that time.`);
  tellTimes(banner);
  banner.hidden = false;
}

const GONE = "the dashboard does not answer; this page asks again every few seconds.";
const STUCK = "the dashboard cannot read the study.";

// A tab that nobody looks at holds no stream: a browser opens six connections to a host, and a seventh tab would wait.
function follow() {
  if (leaving.aborted) return;
  if (document.hidden) {
    document.addEventListener("visibilitychange", follow, { once: true });
    return;
  }
  let failures = 0;
  const started = Date.now();
  const source = new EventSource(`/api/live/${pageName}`);
  const over = () => {
    source.close();
    clearInterval(watch);
    document.removeEventListener("visibilitychange", rest);
    leaving.removeEventListener("abort", over);
  };
  leaving.addEventListener("abort", over);
  const rest = () => { if (document.hidden) { over(); follow(); } };
  document.addEventListener("visibilitychange", rest);
  source.addEventListener("blocks", (event) => {
    failures = 0;
    live("live");
    put(JSON.parse(event.data).blocks);
  });
  source.addEventListener("alive", () => { failures = 0; live("live"); });
  source.addEventListener("stale", () => lost(STUCK));
  source.addEventListener("signed-out", () => { over(); signedOut(); });
  source.addEventListener("error", () => {
    failures += 1;
    if (failures >= 2 || source.readyState === EventSource.CLOSED) { over(); poll(); }
  });
  const watch = setInterval(() => { if (Date.now() - Math.max(heard, started) > SILENT_MS) { over(); poll(); } }, 5000);
}

// Where a proxy holds back event streams, or nobody answers, the same blocks are asked for instead.
async function poll() {
  let answered = 0;
  for (;;) {
    try {
      const answer = await request(`/api/blocks/${pageName}`, AbortSignal.timeout(RETRY_MS * 2));
      if (answer.status === 401) { signedOut(); return; }
      if (answer.ok) {
        const back = body.dataset.connection === "lost";
        live("polling");
        put((await answer.json()).blocks);
        answered += 1;
        if (back || answered % 12 === 0) { follow(); return; } // it is back, or it is time to try the stream again
      } else lost(STUCK);
    } catch {
      if (leaving.aborted) return;
      lost(GONE);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

for (const one of document.querySelectorAll("[data-local]")) one.hidden = false;
tellTimes();
setInterval(tellTimes, 1000);
follow();

// --- a page of a label that is not there yet comes by itself

const waiting = document.querySelector("[data-waits-for]");
if (waiting) {
  const look = async () => {
    const answer = await request(waiting.dataset.waitsFor).catch(() => null);
    if (answer?.ok && (await answer.json()).state === "ready") location.reload();
    else setTimeout(look, 2000);
  };
  setTimeout(look, 1000);
}

// --- jobs on the Ledger page: look again while one runs, without losing the place

async function watchJob(path, done) {
  const answer = await request(path).catch(() => null);
  if (answer?.status === 401) return;
  if (answer?.ok && (await answer.json()).job.state !== "running") done();
  else setTimeout(() => watchJob(path, done), answer?.ok ? 700 : RETRY_MS);
}

for (const [id, path] of [["verify-state", "/api/ledger/verify"], ["certificate-state", "/api/certificate"]]) {
  const place = document.getElementById(id);
  if (place && /since/.test(place.textContent)) watchJob(path, () => location.reload());
}

// --- a file's text into the field that is sent

for (const file of document.querySelectorAll("input[type=file][data-into]")) {
  file.closest("label").hidden = false;
  file.addEventListener("change", async () => {
    if (file.files.length) document.getElementById(file.dataset.into).value = await file.files[0].text();
  });
}
