// Choose data and skew, show the best setting of each method or all, and sort by a column.
const table = document.querySelector("#leaderboard table");
if (table) {
  const body = table.tBodies[0], rows = [...body.rows];
  const [data, skew, all] = ["#data", "#skew", "#all"].map(name => document.querySelector(name)), skews = [...skew.options];
  const show = () => {
    const best = new Map(), better = row => row.dataset.higher === "1" ? +row.dataset.value : -row.dataset.value;
    const ours = rows.filter(row => row.dataset.data === data.value && row.dataset.skew === skew.value);
    for (const row of ours) {
      const old = best.get(row.dataset.method);
      if (!old || better(row) > better(old)) best.set(row.dataset.method, row);
    }
    for (const row of rows) row.hidden = !ours.includes(row) || !(all.checked || best.get(row.dataset.method) === row);
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
      const key = row => row.cells[place].dataset.key ?? row.cells[place].textContent;
      const order = (a, b) => isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(b) - key(a);
      body.append(...rows.sort((a, b) => down * order(a, b)));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => event.key === "Enter" && sort());
  }
  data.addEventListener("change", choose);
  skew.addEventListener("change", show);
  all.addEventListener("change", show);
  choose();
}
