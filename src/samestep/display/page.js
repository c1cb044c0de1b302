"use strict";
// Each figure stands here once for each language; Plotly redraws it where the language is changed.
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = { displayModeBar: false, responsive: true };

function show(language) {
  const root = document.documentElement;
  root.lang = language === "zh" ? "zh-CN" : "en";
  root.dataset.shown = language;
  for (const button of document.querySelectorAll("[data-choose]")) {
    button.setAttribute("aria-pressed", String(button.dataset.choose === language));
  }
  for (const [name, versions] of Object.entries(figures)) {
    const figure = versions[language];
    Plotly.react(name, figure.data, figure.layout, config);
  }
}

for (const button of document.querySelectorAll("[data-choose]")) {
  button.addEventListener("click", () => show(button.dataset.choose));
}

// Paper is narrower than the screen that the plots were drawn for.
function fit(layout) {
  for (const name of Object.keys(figures)) Plotly.relayout(name, layout);
}
window.addEventListener("beforeprint", () => fit({ autosize: false, width: 700 }));
window.addEventListener("afterprint", () => fit({ autosize: true, width: null }));

show(/^zh/i.test(navigator.language || "") ? "zh" : "en");
