// What every page of `ckptkit verify --html` does: the filter of its parameters, and all digits of a number.
// DATA is the report, as `--json` has it.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);

const groups = [...document.querySelectorAll("details.group")].map((element) => ({
  element,
  unfolded: element.open,
  rows: [...element.querySelectorAll("tr[data-row]")].map((row) => ({
    row, status: row.dataset.status, text: row.querySelector("th").textContent.toLowerCase(),
  })),
}));

function applyFilter() {
  const words = document.getElementById("text").value.toLowerCase().split(/\s+/).filter(Boolean);
  const boxes = [...document.querySelectorAll(".filter input[name=status]")];
  const statuses = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
  const active = words.length > 0 || statuses.size < boxes.length;
  let [shown, all] = [0, 0];
  for (const group of groups) {
    let here = 0;
    for (const { row, status, text } of group.rows) {
      row.hidden = !(statuses.has(status) && words.every((word) => text.includes(word)));
      here += row.hidden ? 0 : 1;
    }
    group.element.hidden = here === 0;
    group.element.open = active ? here > 0 : group.unfolded;
    shown += here;
    all += group.rows.length;
  }
  if (groups.length > 0) {
    document.getElementById("shown").textContent = active ? `${shown} of ${all} parameters shown` : `${all} parameters`;
  }
}

function startFilter() {
  const form = document.querySelector(".filter");
  if (!form) {
    return;
  }
  form.hidden = false;
  form.addEventListener("input", applyFilter);
  form.addEventListener("submit", (event) => event.preventDefault());
  const setAll = (open) => groups.forEach((group) => { group.element.open = open; });
  document.getElementById("unfold").addEventListener("click", () => setAll(true));
  document.getElementById("fold").addEventListener("click", () => setAll(false));
  applyFilter(); // a browser that comes back to the page keeps what was typed
}

// All digits of a number, when it is pointed at
document.addEventListener("mouseover", (event) => {
  const number = event.target.closest("data");
  if (number) {
    number.title = number.value;
  }
});

startFilter();
