// Asks the planner again whenever a slider or field changes, and shows its answer.

const form = document.getElementById("planner");
const number = (value) => (value == null ? "–" : Number(value.toPrecision(4)).toString());

function put(plan) {
  document.getElementById("r-problem").hidden = true;
  const verdict = document.getElementById("r-verdict");
  verdict.className = `verdict ${plan.verdict}`;
  verdict.textContent = plan.summary;
  document.getElementById("r-words").textContent = plan.in_words;
  const facts = { ...plan, ...plan.written };
  facts.known_twice = plan.known_twice ? `ε ${plan.written.known_twice.epsilon}` : "too large to compute";
  for (const place of document.querySelectorAll("[data-fact]")) {
    const value = facts[place.dataset.fact];
    place.textContent = typeof value === "string" ? value : number(value);
  }
  const advice = document.getElementById("r-advice");
  advice.replaceChildren();
  if (plan.advice.length) {
    const title = document.createElement("h3");
    title.textContent = "Any one of these changes would make the plan informative";
    const list = document.createElement("ul");
    list.className = "log";
    for (const line of plan.advice) {
      const item = document.createElement("li");
      item.className = "soft advice";
      item.textContent = line;
      list.append(item);
    }
    advice.append(document.createElement("br"), title, list);
  }
  document.getElementById("r-spectrum").textContent = plan.uses_codec_spectrum
    ? "Computed with the study's codec and its public spectrum."
    : "Computed without a spectrum, because no codec has this length. All coordinates are taken as equally uncertain.";
  const rows = plan.written.guarantees.map((one) => {
    const row = document.createElement("tr");
    for (const [text, kind] of [[one.named], [one.epsilon, "n"], [one.delta, "n"], [one.unit], [one.relation]]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (kind) cell.className = kind;
      row.append(cell);
    }
    return row;
  });
  document.getElementById("r-guarantees").replaceChildren(...rows);
  document.getElementById("r-note").textContent = plan.accountant_note;
}

let asking = null;
async function ask() {
  asking?.abort();
  asking = new AbortController();
  const wishes = new URLSearchParams(new FormData(form));
  try {
    const answer = await request(`/api/plan?${wishes}`, asking.signal);
    const result = await answer.json();
    if (answer.ok) {
      put(result);
      history.replaceState(null, "", `/planner?${wishes}`);
    } else if (answer.status === 503) {
      pending = setTimeout(ask, 1500);
    } else {
      const problem = document.getElementById("r-problem");
      problem.textContent = typeof result.detail === "string" ? result.detail : "There is no plan for these values.";
      problem.hidden = false;
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    const problem = document.getElementById("r-problem");
    problem.textContent = "The dashboard does not answer. The figures below are those of the values before; this page asks again every few seconds.";
    problem.hidden = false;
    pending = setTimeout(ask, 5000);
  }
}

let pending = null;
form.addEventListener("input", (event) => {
  const { target } = event;
  const number = target.dataset.for && document.getElementById(target.dataset.for);
  if (number) number.value = target.value;
  const slider = form.querySelector(`[data-for="${target.id}"]`);
  if (slider) {
    slider.max = Math.max(slider.max, target.value); // a typed value may exceed the slider's usual maximum
    slider.value = target.value;
  }
  clearTimeout(pending);
  pending = setTimeout(ask, 120);
});
