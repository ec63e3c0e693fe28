"use strict";
// A gallery has a search field, one button for each group of cards, and a line with the number of cards shown.
for (const gallery of document.querySelectorAll("[data-gallery]")) {
  const field = gallery.querySelector("input[type=search]");
  const buttons = [...gallery.querySelectorAll("button[data-group]")];
  const groups = [...gallery.querySelectorAll("div[data-group]")];
  const count = gallery.querySelector("[data-count]");
  let chosen = groups.length > 0 ? groups[0].dataset.group : "";  // the first group; a search is of all of them
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const group of groups) {
      const isChosen = chosen === "" || group.dataset.group === chosen;
      let inGroup = 0;
      for (const card of group.querySelectorAll("figure")) {
        const text = card.textContent.toLowerCase();
        card.hidden = !words.every((word) => text.includes(word));
        if (isChosen && !card.hidden) inGroup += 1;
      }
      group.hidden = inGroup === 0;
      shown += inGroup;
    }
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.group === chosen));
    count.textContent = shown === 1 ? "1 shown" : `${shown} shown`;
  };
  field.addEventListener("input", () => { if (field.value) chosen = ""; show(); });
  for (const button of buttons) button.addEventListener("click", () => { chosen = button.dataset.group; show(); });
  show();
}
// A slider shows the frames whose list of places has its own, and the label of that place.
for (const slider of document.querySelectorAll("input[data-slider]")) {
  const frames = [...document.getElementById(slider.dataset.slider).querySelectorAll("[data-frames]")];
  const label = document.getElementById(`${slider.dataset.slider}-label`);
  const labels = slider.dataset.labels.split(" ");
  const show = () => {
    for (const frame of frames) frame.hidden = !frame.dataset.frames.split(" ").includes(slider.value);
    label.textContent = labels[Number(slider.value)];
  };
  slider.addEventListener("input", show);
  show();
}
