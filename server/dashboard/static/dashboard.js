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

function tellTimes(root = document) {
  const now = Date.now();
  for (const one of root.querySelectorAll("time[data-ago]")) {
    const text = ago((now - Date.parse(one.dateTime)) / 1000);
    if (one.textContent !== text) one.textContent = text;
  }
  for (const one of root.querySelectorAll("time[data-clock]")) {
    const text = new Date(one.dateTime).toLocaleTimeString([], { hour12: false });
    if (one.textContent !== text) one.textContent = text;
  }
}

// --- live blocks

function put(blocks) {
  for (const [name, html] of Object.entries(blocks)) {
    const place = document.getElementById(`live-${name}`);
    if (!place) continue;
    const focused = place.contains(document.activeElement) ? document.activeElement : null;
    const link = focused?.getAttribute("href");
    place.innerHTML = html;
    if (link) place.querySelector(`[href="${CSS.escape(link)}"]`)?.focus();
    tellTimes(place);
  }
  body.dispatchEvent(new CustomEvent("blocks", { detail: Object.keys(blocks) }));
}

function signedOut() {
  location.assign(`/login?ended=1&next=${encodeURIComponent(location.pathname + location.search)}`);
}

function follow() {
  let failures = 0;
  const source = new EventSource(`/api/live/${pageName}`);
  source.addEventListener("blocks", (event) => {
    failures = 0;
    body.dataset.connection = "live";
    put(JSON.parse(event.data).blocks);
  });
  source.addEventListener("signed-out", () => { source.close(); signedOut(); });
  source.addEventListener("error", () => {
    failures += 1;
    body.dataset.connection = "lost";
    if (failures >= 3 || source.readyState === EventSource.CLOSED) { source.close(); poll(); }
  });
}

// Where a proxy holds back event streams the same blocks are asked for instead.
async function poll() {
  for (;;) {
    try {
      const answer = await fetch(`/api/blocks/${pageName}`, { headers: { accept: "application/json" } });
      if (answer.status === 401) { signedOut(); return; }
      if (answer.ok) { put((await answer.json()).blocks); body.dataset.connection = "polling"; }
    } catch { body.dataset.connection = "lost"; }
    await new Promise((resolve) => setTimeout(resolve, 5000));
  }
}

tellTimes();
setInterval(tellTimes, 1000);
if ("live" in body.dataset) follow();

// --- jobs on the Ledger page: look again while one runs, without losing the place

async function watchJob(path, place, done) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (!answer.ok) return;
  const { job } = await answer.json();
  if (job.state === "running") setTimeout(() => watchJob(path, place, done), 700);
  else done();
}

for (const [id, path] of [["verify-state", "/api/ledger/verify"], ["certificate-state", "/api/certificate"]]) {
  const place = document.getElementById(id);
  if (place && /since/.test(place.textContent)) watchJob(path, place, () => location.reload());
}
