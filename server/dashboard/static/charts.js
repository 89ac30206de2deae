// ε over releases, noise against the spectrum, the student's loss: drawn from the page's own JSON.

const page = document.body.dataset.page;
const drawn = new Map();

function colours() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  return { ink: get("--ink-2"), line: get("--line"), bad: get("--bad"), c: [get("--c1"), get("--c2"), get("--c3"), get("--c4")] };
}

function axes(c, xLabel, yLabel, extra = {}) {
  const font = "12px system-ui, sans-serif";
  const one = { stroke: c.ink, grid: { stroke: c.line, width: 1 }, ticks: { stroke: c.line, width: 1 }, font, labelFont: font, labelSize: 18 };
  return [{ ...one, label: xLabel, size: 34 }, { ...one, label: yLabel, size: 52, ...extra }];
}

function draw(id, make) {
  const place = document.getElementById(id);
  if (!place) return;
  place.hidden = false;
  drawn.get(id)?.destroy();
  const { options, data } = make(colours());
  place.replaceChildren();
  const width = Math.max(280, place.clientWidth);
  drawn.set(id, new uPlot({ width, height: options.height ?? 260, ...options }, data, place));
}

const whole = (u, splits) => splits.map((v) => (Number.isInteger(v) ? v.toLocaleString("en") : ""));
const plain = (u, v) => (v == null ? "–" : v.toLocaleString("en"));
const fixed = (u, v) => (v == null ? "–" : v.toPrecision(4));

async function json(path) {
  const answer = await request(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function epsilonChart(study, c) {
  const x = [0, ...study.curve.map((p) => p.charges)];
  const series = ["exact", "rdp", "paper"].map((name) => [0, ...study.curve.map((p) => p[name])]);
  const budget = x.map(() => study.budget.budget);
  const written = (name) => (u, v, series, at) => (v == null ? "–" : at === 0 ? "0" : study.curve[at - 1][`${name}_text`]); // rounded up by the server
  const line = (label, name, i, dash) => ({ label, stroke: c.c[i], width: 2, dash, value: written(name), points: { show: x.length < 40, size: 5 } });
  return {
    options: {
      height: 380,
      scales: { x: { time: false }, y: { range: (u, lo, hi) => [0, Math.max(hi, study.budget.budget) * 1.06] } },
      axes: [{ ...axes(c, "charges", "ε")[0], values: whole }, axes(c, "", "ε")[1]],
      series: [{ label: "charges", value: plain }, line("exact", "exact", 0), line("RDP", "rdp", 1, [8, 4]), line("paper", "paper", 2, [2, 3]), { label: "budget", stroke: c.bad, width: 1.5, dash: [12, 5], value: (u, v) => (v == null ? "–" : study.budget.budget_text), points: { show: false } }],
      legend: { live: true },
    },
    data: [x, ...series, budget],
  };
}

function noiseChart(noise, c) {
  const x = noise.stds.map((_, i) => i + 1);
  return {
    options: {
      height: 210,
      scales: { x: { time: false }, y: { distr: 3 } },
      axes: [{ ...axes(c, "coordinate of the code", "")[0], values: whole }, axes(c, "", "standard deviation", { values: (u, s) => s.map((v) => (v == null ? "" : v.toPrecision(1))) })[1]],
      series: [{ label: "coordinate", value: plain }, { label: "public shapes", stroke: c.c[0], width: 2, value: fixed, points: { show: x.length < 60, size: 5 } }, { label: "noise on the mean", stroke: c.bad, width: 1.5, dash: [8, 4], value: () => noise.written, points: { show: false } }],
    },
    data: [x, noise.stds, x.map(() => noise.noise)],
  };
}

function passLines(passes, c) {
  return (u) => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = c.ink;
    ctx.fillStyle = c.ink;
    ctx.setLineDash([4, 4]);
    let from = bbox.left;
    passes.forEach((step, i) => {
      const x = Math.round(u.valToPos(step, "x", true));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.textAlign = "right";
      const fits = (text) => ctx.measureText(text).width + 8 < x - from;
      const text = [`pass ${i + 1} ends`, `pass ${i + 1}`, `${i + 1}`].find(fits);
      if (text) ctx.fillText(text, x - 4, bbox.top + 14 * devicePixelRatio);
      from = x;
    });
    ctx.restore();
  };
}

function lossChart(student, c) {
  const loss = new Map(student.losses), dice = new Map(student.validated);
  const x = [...new Set([...loss.keys(), ...dice.keys()])].sort((a, b) => a - b);
  const along = (points) => x.map((step) => points.get(step) ?? null);
  const right = { ...axes(c, "", "Dice")[1], side: 1, scale: "dice", grid: { show: false } };
  const line = (label, i, more) => ({ label, stroke: c.c[i], width: 2, value: fixed, spanGaps: true, ...more });
  return {
    options: {
      height: 300,
      hooks: { draw: [passLines(student.passes, c)] },
      scales: { x: { time: false }, dice: { range: [0, 1] } },
      axes: [{ ...axes(c, "step", "")[0], values: whole }, axes(c, "", "loss")[1], ...(dice.size ? [right] : [])],
      series: [{ label: "step", value: plain }, line("loss", 0, { points: { show: loss.size < 60, size: 5 } }), ...(dice.size ? [line("Dice, validation", 1, { scale: "dice", points: { show: true, size: 6 } })] : [])],
    },
    data: [x, along(loss), ...(dice.size ? [along(dice)] : [])],
  };
}

const kept = {};

async function load() {
  if (page === "study") {
    kept.study = await json("/api/study");
    if (document.getElementById("chart-noise")) kept.noise = await json("/api/study/noise");
  } else if (page === "student" && document.getElementById("chart-loss")) {
    kept.student = await json("/api/student");
  }
  redraw();
}

function redraw() {
  if (kept.study?.curve.length) {
    document.getElementById("no-curve")?.remove();
    draw("chart-epsilon", (c) => epsilonChart(kept.study, c));
  }
  if (kept.noise) draw("chart-noise", (c) => noiseChart(kept.noise, c));
  if (kept.student?.losses.length) draw("chart-loss", (c) => lossChart(kept.student, c));
}

let pending = null;
function later() {
  clearTimeout(pending);
  pending = setTimeout(redraw, 150);
}

document.body.addEventListener("blocks", (event) => {
  if (event.detail.some((name) => name === "budget" || name === "facts")) load().catch(() => {});
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", later);
load().catch((error) => {
  for (const place of document.querySelectorAll(".chart")) place.textContent = `The chart could not be loaded (${error.message}). Load the page again.`;
});
