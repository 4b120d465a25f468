// A question of viz/predict.py: choices or a number field, a button, and what became of it. An anywidget.
// What is committed goes with the press of the button: the kernel never sees an older choice.

const make = (tag, settings = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), settings);
  element.append(...children);
  return element;
};

let questions = 0; // on this page, so that the choices of two questions are two groups

function render({ model, el }) {
  const { question, choices, unit } = model.get("asked");
  const group = `mr-predict-${questions++}`;
  const fields = choices.length
    ? choices.map((value) => make("input", { type: "radio", name: group, value }))
    : [make("input", { type: "text", inputMode: "decimal", placeholder: `how many ${unit}?`, ariaLabel: unit })];
  const button = make("button", { type: "submit", textContent: "Commit" });
  const said = make("output");
  const form = make(
    "form", { className: "mr-predict" },
    make("fieldset", {},
      make("legend", {}, make("b", { textContent: "Predict: " }), question),
      ...fields.map((field, i) => make("label", {}, field, choices.length ? ` ${choices[i]}` : "")),
    ),
    button, said,
  );
  // Arrow keys and Enter are the form's: JupyterLab would go to another cell.
  form.dataset.lmSuppressShortcuts = "true";
  form.addEventListener("keydown", (event) => {
    if (event.shiftKey && event.key === "Enter" || event.ctrlKey || event.metaKey || event.altKey) return;
    event.stopPropagation();
    if (event.key !== "Enter" || event.target === button) return;
    event.preventDefault();
    form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const chosen = choices.length ? fields.find((field) => field.checked) : fields[0];
    model.send({ commit: chosen ? chosen.value : "" });
  });
  const show = () => {
    const { guess, words } = model.get("state");
    said.textContent = words;
    if (!guess) return;
    for (const field of fields) {
      if (choices.length) field.checked = field.value === guess;
      else field.value = guess;
    }
    for (const field of [...fields, button]) field.disabled = true;
  };
  model.on("change:state", show);
  show();
  el.append(form);
}

export default { render };
