// Choose a task, show the best setting of each method or all, and sort by a column.
const table = document.querySelector("#leaderboard table");
if (table) {
  const body = table.tBodies[0], rows = [...body.rows], task = document.querySelector("#task"), all = document.querySelector("#all");
  const show = () => {
    const best = new Map(), better = row => row.dataset.higher === "1" ? +row.dataset.value : -row.dataset.value;
    for (const row of rows) {
      const old = best.get(row.dataset.method);
      if (row.dataset.task === task.value && (!old || better(row) > better(old))) best.set(row.dataset.method, row);
    }
    for (const row of rows)
      row.hidden = row.dataset.task !== task.value || !(all.checked || best.get(row.dataset.method) === row);
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
  task.addEventListener("change", show);
  all.addEventListener("change", show);
  show();
}
