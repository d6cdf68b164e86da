// Choose data and skew, show the best setting of each method or all, and sort by a column.
const table = document.querySelector("#leaderboard table");
if (table) {
  const body = table.tBodies[0], rows = [...body.rows];
  const [data, skew, pretrained, all] = ["#data", "#skew", "#pretrained", "#all"].map(name => document.querySelector(name));
  const skews = [...skew.options];
  const better = (a, b) => a.dataset.few === b.dataset.few
    ? (a.dataset.higher === "1" ? a.dataset.value - b.dataset.value : b.dataset.value - a.dataset.value) > 0
    : a.dataset.few === "0";  // a value of three seeds or more comes before those of fewer
  const show = () => {
    const best = new Map();
    const ours = rows.filter(row => row.dataset.data === data.value && row.dataset.skew === skew.value);
    if (!ours.some(row => row.dataset.pretrained === "0")) pretrained.checked = true;
    const shown = ours.filter(row => pretrained.checked || row.dataset.pretrained === "0");
    for (const row of shown) {
      const old = best.get(row.dataset.method);
      if (!old || better(row, old)) best.set(row.dataset.method, row);
    }
    for (const row of rows) row.hidden = !shown.includes(row) || !(all.checked || best.get(row.dataset.method) === row);
  };
  const choose = () => {
    skew.replaceChildren(...skews.filter(one => one.dataset.data === data.value));
    skew.selectedIndex = 0;
    show();
  };
  for (const [place, head] of [...table.tHead.rows[0].cells].entries()) {
    let down = -1;
    head.tabIndex = 0;
    head.style.cursor = "pointer";
    const sort = () => {
      down = -down;
      const key = row => row.cells[place].dataset.key;
      const order = (a, b) => isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(b) - key(a);
      body.append(...rows.sort((a, b) => down * order(a, b)));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => event.key === "Enter" && sort());
  }
  data.addEventListener("change", choose);
  for (const one of [skew, pretrained, all]) one.addEventListener("change", show);
  choose();
}
