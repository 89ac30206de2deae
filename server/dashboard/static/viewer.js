// The slice viewer: sliders, wheel and layers ask the server for one small picture each.

const form = document.getElementById("viewer");

if (form) {
  const { volume, key } = form.dataset;
  const layer = () => form.querySelector("input[name=layer]:checked").value;

  function show(slider) {
    const image = form.querySelector(`img[data-plane=${slider.name}]`);
    document.getElementById(`out-${slider.name}`).textContent = `${slider.value} of ${slider.max}`;
    image.alt = image.alt.replace(/slice \d+/, `slice ${slider.value}`).replace(/overlay: .*/, `overlay: ${layer()}`);
    image.src = `/api/labels/${volume}/slice.png?plane=${slider.name}&index=${slider.value}&layer=${layer()}&v=${key}`;
  }

  const sliders = [...form.querySelectorAll("input[type=range]")];
  for (const slider of sliders) {
    slider.addEventListener("input", () => show(slider));
    slider.closest(".plane").addEventListener("wheel", (event) => {
      event.preventDefault();
      const before = slider.value;
      slider.value = Number(slider.value) + Math.sign(event.deltaY);
      if (slider.value !== before) show(slider);
    }, { passive: false });
  }
  form.addEventListener("change", (event) => {
    if (event.target.name === "layer") sliders.forEach(show);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
}
