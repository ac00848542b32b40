// The figures: which runs and curves are drawn, and the numbers under the pointer.
(() => {
  const { box, figures } = JSON.parse(document.getElementById("figure-data").textContent);
  const root = document.documentElement;
  const charts = [...document.querySelectorAll(".chart")].map((element) => {
    const [rule, tip] = [element.querySelector(".rule"), element.querySelector(".tip")];
    return { element, rule, tip, plot: element.querySelector(".plot"), ...figures[element.dataset.figure] };
  });

  for (const input of document.querySelectorAll("[name=show]")) {
    input.addEventListener("change", () => { root.dataset.show = input.value; });
  }
  for (const input of document.querySelectorAll("[data-kind]")) {
    input.addEventListener("change", () => root.classList.toggle(`hide${input.dataset.kind}`, !input.checked));
  }

  const scaled = (chart, x) => chart.over === "k" ? Math.log2(x) : x;
  const place = (chart, x) => {  // of x in the picture, from 0 to 1
    const [low, high] = chart.limits.map((end) => scaled(chart, end));
    return box.left + (scaled(chart, x) - low) / (high - low) * (box.right - box.left);
  };
  const nearest = (line, x) => line.x.reduce((best, value, i) => Math.abs(value - x) < Math.abs(line.x[best] - x) ? i : best, 0);

  function clear() {
    for (const { rule, tip } of charts) rule.hidden = tip.hidden = true;
  }

  function point(chart, event) {
    const { left, width } = chart.plot.getBoundingClientRect();
    const at = (event.clientX - left) / width;
    const xs = [...new Set(chart.lines.flatMap((line) => line.x))];
    const x = xs.reduce((best, value) => Math.abs(place(chart, value) - at) < Math.abs(place(chart, best) - at) ? value : best, xs[0]);
    for (const other of charts) {
      const here = place(other, x);
      other.tip.hidden = other !== chart;
      other.rule.hidden = other.over !== chart.over || here < box.left || here > box.right;
      other.rule.style.left = `${100 * here}%`;
    }
    const head = document.createElement("b");
    head.textContent = `${chart.over} ${Number(x.toPrecision(7))}`;
    const rows = chart.lines.filter((line) => !root.classList.contains(`hide${line.kind}`)).map((line) => {
      const i = nearest(line, x), row = document.createElement("div"), dot = document.createElement("i");
      dot.className = chart.stack ? "" : `swatch kind${line.kind}`;
      row.append(dot, `${line.name} ${shown(chart, line.x[i] === x ? line.y[i] : null)}`);
      return row;
    });
    chart.tip.replaceChildren(head, ...rows);
    const right = at > 0.55;
    chart.tip.style.left = right ? "auto" : `${100 * place(chart, x) + 2}%`;
    chart.tip.style.right = right ? `${100 - 100 * place(chart, x) + 2}%` : "auto";
  }

  const shown = (chart, y) => y === null ? "–" : chart.percent ? `${(100 * y).toFixed(1)} %` : String(Number(y.toPrecision(4)));

  for (const chart of charts) {
    chart.plot.addEventListener("pointermove", (event) => point(chart, event));
    chart.plot.addEventListener("pointerleave", clear);
  }
})();
