// The volume viewer: every array comes once as bytes, three linked planes are drawn here. Without it, or where the
// arrays do not come, the page shows the server's pictures.

const form = document.getElementById("viewer");
const facts = JSON.parse(form.dataset.facts);
const [nx, ny, nz] = facts.grid;
const spacing = facts.spacing_mm;
const at = [...facts.centre];
const COLOURS = [
  [86, 180, 233], [230, 159, 0], [204, 121, 167], [0, 158, 115], [213, 94, 0],
  [240, 228, 66], [148, 103, 255], [255, 158, 171], [164, 222, 91], [176, 110, 72],
  [0, 215, 215], [255, 64, 96], [96, 120, 255], [200, 200, 140], [255, 110, 255],
  [90, 160, 60], [255, 200, 150], [130, 200, 190], [190, 150, 230], [160, 140, 0],
];
const PLANES = [["axial", 2, 0, 1], ["coronal", 1, 0, 2], ["sagittal", 0, 1, 2]]; // name, fixed axis, across, up
const SHAPE = [nx, ny, nz];
const STRIDE = [1, nx, nx * ny];
const arrays = {};
const planes = {};
let zoom = 1;
let active = "axial";

const field = (name) => form.querySelector(`[data-view=${name}]`);
const layer = () => form.querySelector("input[name=layer]:checked").value;

async function load() {
  const answer = await request(`/api/labels/${form.dataset.volume}/voxels?v=${form.dataset.key}`);
  if (!answer.ok) throw new Error(`${answer.status}`);
  const bytes = new Uint8Array(await answer.arrayBuffer());
  const size = nx * ny * nz;
  answer.headers.get("x-arrays").split(",").forEach((name, i) => { arrays[name] = bytes.subarray(i * size, (i + 1) * size); });
  for (const [name, fixed, across, up] of PLANES) {
    const place = form.querySelector(`[data-plane=${name}]`);
    const canvas = document.createElement("canvas");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    const raw = new OffscreenCanvas(SHAPE[across], SHAPE[up]);
    planes[name] = { fixed, across, up, canvas, raw, ink: raw.getContext("2d", { willReadFrequently: true }), pixels: new ImageData(SHAPE[across], SHAPE[up]) };
    place.replaceWith(canvas);
    listen(name);
  }
  form.classList.add("drawn");
  fit();
}

function cut(plane) {
  const { fixed, across, up, pixels } = plane;
  const [w, h] = [SHAPE[across], SHAPE[up]];
  const out = pixels.data;
  const level = Number(field("level").value), width = Math.max(1, Number(field("window").value));
  const opacity = Number(field("opacity").value) / 100;
  const name = layer();
  const over = name === "none" || name === "disagreement" ? null : arrays[name];
  const { image, label, student } = arrays;
  const base = at[fixed] * STRIDE[fixed];
  const low = level - width / 2, scale = 255 / width;
  for (let v = 0; v < h; v += 1) {
    for (let u = 0; u < w; u += 1) {
      const i = base + (w - 1 - u) * STRIDE[across] + (h - 1 - v) * STRIDE[up]; // right on the left, superior on top
      const grey = Math.max(0, Math.min(255, (image[i] - low) * scale));
      let r = grey, g = grey, b = grey, a = 0, c = null;
      if (over && (name === "doubt" || name === "confidence")) {
        a = Math.min(1, (name === "doubt" ? over[i] : 255 - over[i]) / 128);
        c = [255, 122, 47];
      } else if (over && over[i]) {
        c = COLOURS[(over[i] - 1) % COLOURS.length];
        const edge = u === 0 || v === 0 || u === w - 1 || v === h - 1 || over[i + STRIDE[across]] !== over[i] || over[i - STRIDE[across]] !== over[i] || over[i + STRIDE[up]] !== over[i] || over[i - STRIDE[up]] !== over[i];
        a = edge ? 1 : 0.45;
      } else if (name === "disagreement" && student && label[i] !== student[i]) {
        c = label[i] ? [86, 180, 233] : [255, 122, 47];
        a = 1;
      }
      if (c) {
        a *= opacity;
        r += a * (c[0] - r); g += a * (c[1] - g); b += a * (c[2] - b);
      }
      const o = 4 * (v * w + u);
      out[o] = r; out[o + 1] = g; out[o + 2] = b; out[o + 3] = 255;
    }
  }
}

// Where a plane's picture lies on its canvas: the whole of it, or around the crosshair when zoomed in.
function frame(plane) {
  const { across, up, canvas } = plane;
  const mm = [SHAPE[across] * spacing[across], SHAPE[up] * spacing[up]];
  const scale = zoom * Math.min(canvas.width / mm[0], canvas.height / mm[1]);
  const size = [mm[0] * scale, mm[1] * scale];
  const point = [(SHAPE[across] - at[across] - 0.5) / SHAPE[across], (SHAPE[up] - at[up] - 0.5) / SHAPE[up]];
  const place = (i, room) => (size[i] <= room ? (room - size[i]) / 2 : Math.max(room - size[i], Math.min(0, room / 2 - point[i] * size[i])));
  return { x: place(0, canvas.width), y: place(1, canvas.height), w: size[0], h: size[1], point };
}

// The drawn label's outline along the voxels' edges, black with white dashes, so that it shows on every layer and ground.
function outline(plane, ink, { x, y, w, h }) {
  const { fixed, across, up } = plane;
  const [columns, rows] = [SHAPE[across], SHAPE[up]];
  const [du, dv] = [w / columns, h / rows];
  const base = at[fixed] * STRIDE[fixed];
  const value = (u, v) => (u < 0 || v < 0 || u >= columns || v >= rows ? 0 : arrays.label[base + (columns - 1 - u) * STRIDE[across] + (rows - 1 - v) * STRIDE[up]]);
  const path = new Path2D();
  for (let v = 0; v <= rows; v += 1) {
    for (let u = 0; u <= columns; u += 1) {
      const one = value(u, v);
      if (one !== value(u - 1, v)) { path.moveTo(x + u * du, y + v * dv); path.lineTo(x + u * du, y + (v + 1) * dv); }
      if (one !== value(u, v - 1)) { path.moveTo(x + u * du, y + v * dv); path.lineTo(x + (u + 1) * du, y + v * dv); }
    }
  }
  const fine = devicePixelRatio || 1;
  ink.save();
  ink.lineWidth = 2.5 * fine;
  ink.strokeStyle = "#000";
  ink.stroke(path);
  ink.setLineDash([du / 2, du / 2]);
  ink.lineWidth = 1.5 * fine;
  ink.strokeStyle = "#fff";
  ink.stroke(path);
  ink.restore();
}

function draw(name) {
  const plane = planes[name];
  cut(plane);
  plane.ink.putImageData(plane.pixels, 0, 0);
  const ink = plane.canvas.getContext("2d");
  const place = frame(plane);
  const { x, y, w, h, point } = place;
  ink.fillStyle = "#0b0e11";
  ink.fillRect(0, 0, plane.canvas.width, plane.canvas.height);
  ink.imageSmoothingEnabled = zoom < 3;
  ink.drawImage(plane.raw, x, y, w, h);
  if (field("drawn")?.checked) outline(plane, ink, place);
  ink.strokeStyle = "rgba(255, 255, 255, .55)";
  ink.beginPath();
  ink.moveTo(x + point[0] * w, y); ink.lineTo(x + point[0] * w, y + h);
  ink.moveTo(x, y + point[1] * h); ink.lineTo(x + w, y + point[1] * h);
  ink.stroke();
  const slider = document.getElementById(`at-${name}`);
  slider.value = at[plane.fixed];
  document.getElementById(`out-${name}`).textContent = `${at[plane.fixed] + 1} of ${SHAPE[plane.fixed]}`;
  plane.canvas.setAttribute("aria-label", `${name} slice ${at[plane.fixed] + 1} of ${SHAPE[plane.fixed]}, overlay: ${layer()}`);
}

let due = false;
function show() {
  if (due || !Object.keys(planes).length) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const started = performance.now();
    Object.keys(planes).forEach(draw);
    form.dataset.ms = (performance.now() - started).toFixed(2); // the last change, all three planes
    const i = at[0] + at[1] * STRIDE[1] + at[2] * STRIDE[2];
    const said = [`x ${at[0] + 1}, y ${at[1] + 1}, z ${at[2] + 1}`, `label: ${facts.labels[arrays.label[i]]}`];
    if (arrays.centre) said.push(`public start: ${facts.labels[arrays.centre[i]]}`);
    if (arrays.doubt) said.push(`uncertain by noise: ${Math.round(arrays.doubt[i] / 2.55)} %`);
    for (const name of ["student", "own", "adapted"]) {
      if (arrays[name]) said.push(`${name}: ${facts.labels[arrays[name][i]]}`);
    }
    document.getElementById("voxel").textContent = said.join(" · ");
  });
}

function fit() {
  for (const { canvas } of Object.values(planes)) {
    const side = Math.max(160, Math.round(canvas.parentElement.clientWidth * (devicePixelRatio || 1)));
    canvas.width = canvas.height = side;
  }
  show();
}

function move(axis, to) {
  at[axis] = Math.max(0, Math.min(SHAPE[axis] - 1, Math.round(to)));
  show();
}

function listen(name) {
  const plane = planes[name];
  const { canvas } = plane;
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    const { x, y, w, h } = frame(plane);
    const u = ((event.clientX - box.left) * (canvas.width / box.width) - x) / w;
    const v = ((event.clientY - box.top) * (canvas.height / box.height) - y) / h;
    move(plane.across, SHAPE[plane.across] * (1 - u) - 0.5);
    move(plane.up, SHAPE[plane.up] * (1 - v) - 0.5);
  };
  canvas.addEventListener("pointerdown", (event) => { active = name; canvas.setPointerCapture(event.pointerId); point(event); });
  canvas.addEventListener("pointermove", (event) => { if (event.buttons & 1) point(event); });
  canvas.addEventListener("focus", () => { active = name; });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.ctrlKey) { zoom = Math.max(1, Math.min(12, zoom * (event.deltaY < 0 ? 1.2 : 1 / 1.2))); show(); }
    else move(plane.fixed, at[plane.fixed] + Math.sign(event.deltaY));
  }, { passive: false });
  document.getElementById(`at-${name}`).addEventListener("input", (event) => { active = name; move(plane.fixed, Number(event.target.value)); });
}

function decide(verdict) {
  const button = document.querySelector(`button[data-decide=${verdict}]`) ?? document.querySelector(`#decision button[value=${verdict}]`);
  button?.click();
}

const KEYS = {
  ArrowUp: () => move(planes[active].fixed, at[planes[active].fixed] + 1),
  ArrowDown: () => move(planes[active].fixed, at[planes[active].fixed] - 1),
  x: () => planes.sagittal.canvas.focus(), y: () => planes.coronal.canvas.focus(), z: () => planes.axial.canvas.focus(),
  "+": () => { zoom = Math.min(12, zoom * 1.2); show(); },
  "-": () => { zoom = Math.max(1, zoom / 1.2); show(); },
  o: () => {
    const slider = field("opacity");
    slider.value = Number(slider.value) ? 0 : 100;
    show();
  },
  l: () => {
    const all = [...form.querySelectorAll("input[name=layer]")];
    all[(all.findIndex((one) => one.checked) + 1) % all.length].checked = true;
    show();
  },
  n: () => document.querySelector("a[rel=next]")?.click(),
  p: () => document.querySelector("a[rel=prev]")?.click(),
  a: () => decide("accept"),
  r: () => decide("reject"),
};

// Keys of one character, which speech input may type unmeant, can be turned off here. The browser keeps the choice.
const keys = field("keys");
const kept = storage();
keys.checked = kept?.getItem("viewer-keys") !== "off";
keys.addEventListener("change", () => kept?.setItem("viewer-keys", keys.checked ? "on" : "off"));

function storage() {
  try {
    return window.localStorage;
  } catch {
    return null; // the browser keeps nothing for this site
  }
}

document.addEventListener("keydown", (event) => {
  if (!keys.checked && event.key.length === 1) return;
  const typing = event.target.matches("input:not([type=range]):not([type=radio]), textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !Object.keys(planes).length) return;
  if (event.target.matches("input[type=range], input[type=radio]") && event.key.startsWith("Arrow")) return;
  if (KEYS[event.key]) { KEYS[event.key](); event.preventDefault(); }
});
form.addEventListener("input", show);
form.addEventListener("change", show);
form.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("reset").addEventListener("click", () => {
  zoom = 1;
  facts.centre.forEach((value, axis) => { at[axis] = value; });
  for (const name of ["window", "level", "opacity"]) field(name).value = field(name).defaultValue;
  show();
});
addEventListener("resize", fit);

// The server's pictures, where the arrays do not come.
function pictures() {
  for (const slider of form.querySelectorAll(".plane input[type=range]")) {
    const picture = () => {
      const image = form.querySelector(`img[data-plane=${slider.name}]`);
      image.src = `/api/labels/${form.dataset.volume}/slice.png?plane=${slider.name}&index=${slider.value}&layer=${layer()}&v=${form.dataset.key}`;
      document.getElementById(`out-${slider.name}`).textContent = `${Number(slider.value) + 1} of ${Number(slider.max) + 1}`;
    };
    slider.addEventListener("input", picture);
    form.addEventListener("change", picture);
  }
}

load().catch(pictures);
