// The figures: shows and hides curves, and shows the values under the pointer.
(() => {
  const { box, figures } = JSON.parse(document.getElementById("figure-data").textContent);
  const root = document.documentElement;
  const charts = [...document.querySelectorAll(".chart")].map((element) => ({
    element,
    plot: element.querySelector(".plot"),
    rule: element.querySelector(".rule"),
    tip: element.querySelector(".tip"),
    ...figures[element.dataset.figure],
  }));

  for (const input of document.querySelectorAll("[name=show]")) {
    input.addEventListener("change", () => { root.dataset.show = input.value; });
  }
  for (const input of document.querySelectorAll("[data-color]")) {
    const name = `hide${input.dataset.color}`;
    input.addEventListener("change", () => root.classList.toggle(name, !input.checked));
  }

  // Returns the position of x in the figure, as a share of its width.
  function toShare(chart, x) {
    const scale = chart.over === "k" ? Math.log2 : (value) => value;
    const [low, high] = chart.limits.map(scale);
    return box.left + (scale(x) - low) / (high - low) * (box.right - box.left);
  }

  // Returns the index of the value with the smallest distance.
  function nearest(values, distance) {
    const closer = (best, value, i) => distance(value) < distance(values[best]) ? i : best;
    return values.reduce(closer, 0);
  }

  function format(chart, y) {
    if (y === null) return "–";
    return chart.percent ? `${(100 * y).toFixed(1)} %` : String(Number(y.toPrecision(4)));
  }

  function clear() {
    for (const { rule, tip } of charts) rule.hidden = tip.hidden = true;
  }

  function point(chart, event) {
    const { left, width } = chart.plot.getBoundingClientRect();
    const pointer = (event.clientX - left) / width;
    const xs = [...new Set(chart.lines.flatMap((line) => line.x))];
    const x = xs[nearest(xs, (value) => Math.abs(toShare(chart, value) - pointer))];
    for (const other of charts) {
      const share = toShare(other, x);
      other.tip.hidden = other !== chart;
      other.rule.hidden = other.over !== chart.over || share < box.left || share > box.right;
      other.rule.style.left = `${100 * share}%`;
    }
    const head = document.createElement("b");
    head.textContent = `${chart.over} ${Number(x.toPrecision(7))}`;
    const lines = chart.lines.filter((line) => !root.classList.contains(`hide${line.color}`));
    chart.tip.replaceChildren(head, ...lines.map((line) => tipRow(chart, line, x)));
    const tipOnLeft = pointer > 0.55;
    const share = 100 * toShare(chart, x);
    chart.tip.style.left = tipOnLeft ? "auto" : `${share + 2}%`;
    chart.tip.style.right = tipOnLeft ? `${100 - share + 2}%` : "auto";
  }

  function tipRow(chart, line, x) {
    const i = nearest(line.x, (value) => Math.abs(value - x));
    const row = document.createElement("div");
    const dot = document.createElement("i");
    dot.className = chart.stack ? "" : `swatch color${line.color}`;
    row.append(dot, `${line.name} ${format(chart, line.x[i] === x ? line.y[i] : null)}`);
    return row;
  }

  for (const chart of charts) {
    chart.plot.addEventListener("pointermove", (event) => point(chart, event));
    chart.plot.addEventListener("pointerleave", clear);
  }
})();
