// The credit viewer: one group's completions at a time, every token coloured, the numbers of the one in focus beside them.
(() => {
  const source = document.getElementById("viewer-data");
  if (!source) return;
  const { runs } = JSON.parse(source.textContent);
  const $ = (id) => document.getElementById(id);
  const FIXED = 4, BINS = 8;  // columns before those of the schemes: piece, id, entropy, log-prob; steps of a colour
  let view = null;            // the group on view
  let asked = 0;

  // ---- data

  async function unpack(number, count) {
    const bytes = Uint8Array.from(atob($(`packed-${number}`).textContent), (char) => char.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const sorted = new Uint8Array(await new Response(plain).arrayBuffer());
    const words = sorted.length / 4, joined = new Uint8Array(sorted.length);
    for (let rank = 0; rank < 4; rank++) {
      for (let i = 0, from = rank * words; i < words; i++) joined[4 * i + rank] = sorted[from + i];
    }
    const size = words / count, column = (kind, i) => new kind(joined.buffer, 4 * i * size, size);
    return { piece: column(Int32Array, 0), id: column(Int32Array, 1), entropy: column(Float32Array, 2), logProb: column(Float32Array, 3),
      shaped: (scheme) => column(Float32Array, FIXED + 2 * scheme), advantage: (scheme) => column(Float32Array, FIXED + 2 * scheme + 1) };
  }

  const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
  const scheme = () => Number(chosen("scheme"));

  function values() {
    const mode = chosen("colour");
    return mode === "entropy" ? view.data.entropy : view.data[mode](scheme());
  }

  const plain = (value) => String(value).replace("-", "−");
  const digits = (value) => Math.abs(value) >= 1e4 || Math.abs(value) < 1e-4 ? String(Number(value.toPrecision(4))) : value.toPrecision(4);
  const fmt = (value) => Number.isFinite(value) ? plain(digits(value)) : "–";

  // ---- what is drawn

  function make(tag, attributes, ...children) {
    const element = Object.assign(document.createElement(tag), attributes);
    element.append(...children);
    return element;
  }

  function fill(select, labels) {
    select.replaceChildren(...labels.map((text, i) => make("option", { value: i, textContent: text })));
  }

  const run = () => runs[$("v-run").value];
  const step = () => run().steps[$("v-step").value];

  function mostMixed(steps) {  // the step at which there is most to see, the later of two that are alike
    const mixed = steps.map(({ groups }) => groups.reduce((sum, { correct }) => {
      const right = correct.filter(Boolean).length;
      return sum + Math.min(right, correct.length - right);
    }, 0));
    return mixed.lastIndexOf(Math.max(...mixed));
  }

  function onRun() {
      fill($("v-step"), run().steps.map((each) => `${each.step}`));
    $("v-step").value = mostMixed(run().steps);
    const kept = document.querySelector("input[name=scheme]:checked")?.dataset.label;
    const methods = run().schemes.map((each, i) => {
      const input = make("input", { type: "radio", name: "scheme", value: i });
      input.dataset.label = each.label;
      return make("label", {}, input, ` ${each.label}${each.trained && run().schemes.length === 3 ? " (as trained)" : ""}`);
    });
    $("v-methods").replaceChildren($("v-methods").querySelector("legend"), ...methods);
    const same = run().schemes.findIndex((each) => each.label === kept);
    document.querySelectorAll("input[name=scheme]")[same >= 0 ? same : run().schemes.findIndex((each) => each.trained)].checked = true;
    onStep();
  }

  function onStep() {
    fill($("v-group"), step().groups.map((group, i) => {
      const right = group.correct.filter(Boolean).length;
      return `${i + 1}: ${right} of ${group.correct.length} correct`;
    }));
    onGroup();
  }

  async function onGroup() {
    const ticket = ++asked, at = Number($("v-group").value), group = step().groups[at], current = run();
    $("v-prev").disabled = at === 0;
    $("v-next").disabled = at === step().groups.length - 1;
    const data = await unpack(group.packed, FIXED + 2 * current.schemes.length);
    if (ticket !== asked) return;  // another one was asked for meanwhile
    view = { run: current, group, data, rows: [], spans: [], owner: [], now: -1 };
    let start = 0;
    group.lengths.forEach((length, i) => {
      view.rows.push({ start, length, correct: group.correct[i], i });
      start += length;
    });
    draw();
    colour();
  }

  function draw() {
    const { group, data, run: { pieces, breaks } } = view, broken = new Set(breaks);
    $("v-prompt").replaceChildren(make("b", { textContent: "Prompt  " }), group.prompt, make("br"), make("b", { textContent: "Answer  " }), group.answer);
    view.order = [];
    const sides = [[true, "Correct, O+"], [false, "Wrong, O−"]].map(([correct, title]) => {
      const rows = view.rows.filter((row) => row.correct === correct);
      if (!rows.length) return null;
      const side = make("section", { className: `side ${correct ? "right" : "wrong"}` },
        make("h4", {}, make("i"), `${title}: ${rows.length} of ${view.rows.length}`));
      const grid = make("div", {});
      grid.setAttribute("role", "grid");
      grid.setAttribute("aria-label", `${title}, token by token`);
      for (const row of rows) {
        const flow = make("div", { className: "flow", dir: "ltr" });
        for (let i = row.start; i < row.start + row.length; i++) {
          const span = make("span", { className: "t", tabIndex: -1, textContent: pieces[data.piece[i]] });
          span.setAttribute("role", "gridcell");
          span.token = i;
          view.spans[i] = span;
          view.owner[i] = row;
          flow.append(span);
          if (broken.has(data.piece[i])) flow.append(make("br"));
        }
        const about = [`reward ${plain(group.reward[row.i])}`];
        if (!group.finished[row.i]) about.push("cut off");
        if (group.guided[row.i]) about.push("by the guide");
        if (!group.counted[row.i]) about.push("left out");
        row.sums = make("span");
        flow.setAttribute("role", "presentation");
        row.element = make("div", { className: "row" },
          make("header", { role: "rowheader" }, make("b", { textContent: `${correct ? "✓" : "✗"} ${row.i + 1}` }), `  ${about.join(", ")}`, make("br"), row.sums), flow);
        row.element.setAttribute("role", "row");
        view.order.push(row);
        grid.append(row.element);
      }
      side.append(grid);
      return side;
    });
    $("v-tokens").classList.toggle("long", view.spans.length > 8000);  // then what is out of sight is not laid out
    $("v-tokens").replaceChildren(...sides.filter(Boolean));
    if (view.order.length) view.spans[view.order[0].start].tabIndex = 0;
    $("v-token").replaceChildren(make("p", { className: "note", textContent: "Point at a token, or move to one with the arrow keys." }));
  }

  function colour() {
    if (!view) return;
    const mode = chosen("colour"), numbers = values();
    const ends = { plus: [Infinity, 0], minus: [Infinity, 0], ent: [0, 0] };
    const hue = (value) => mode === "entropy" ? "ent" : value > 0 ? "plus" : value < 0 ? "minus" : "";
    for (const value of numbers) {
      const end = ends[hue(value)], size = Math.abs(value);
      if (end) { end[0] = Math.min(end[0], size); end[1] = Math.max(end[1], size); }
    }
    const names = {};
    for (const kind of Object.keys(ends)) names[kind] = Array.from({ length: BINS + 1 }, (_, i) => `t ${kind} q${i}`);
    numbers.forEach((value, i) => {
      const kind = hue(value), [low, high] = ends[kind] ?? [0, 0];
      const share = high - low > 1e-6 * high ? (Math.abs(value) - low) / (high - low) : 0.5;
      view.spans[i].className = kind ? names[kind][kind === "ent" ? Math.round(BINS * share) : 1 + Math.round((BINS - 1) * share)] : "t";
    });
    scales(mode, ends);
    for (const row of view.rows) {
      const mine = numbers.subarray(row.start, row.start + row.length), total = mine.reduce((sum, value) => sum + value, 0);
      row.sums.textContent = `${row.length} tokens, mean ${fmt(total / Math.max(row.length, 1))}`;
    }
    const right = view.group.correct.filter(Boolean).length, all = view.group.correct.length;
    const chance = right === 0 || right === all;
    $("v-note").textContent = `${chance ? `Every completion is ${right ? "correct" : "wrong"}: the group has no contrast. ` : ""}`
      + `${step().groups.length} of the ${step().prompts} groups of step ${step().step} are kept token by token, the most mixed first.`;
    if (view.now >= 0) show(view.now);
  }

  function scales(mode, ends) {
    const bars = Object.entries(ends).filter(([, [low, high]]) => high > 0 && low < Infinity).map(([kind, [low, high]]) => {
      const sign = kind === "minus" ? -1 : 1, cells = [];
      for (let i = kind === "ent" ? 0 : 1; i <= BINS; i++) cells.push(make("i", { className: `${kind} q${i}` }));
      const title = { ent: "Entropy, nats", plus: mode === "shaped" ? "Reward paid" : "Pushed up", minus: mode === "shaped" ? "Reward charged" : "Pushed down" }[kind];
      const ends = high - low > 1e-6 * high ? [fmt(sign * low), fmt(sign * high)] : [`${fmt(sign * low)} throughout`];
      return make("div", {}, make("span", { textContent: title }), make("span", { className: "ramp" }, ...cells),
        make("span", {}, ...ends.map((textContent) => make("span", { textContent }))));
    });
    $("v-scale").replaceChildren(...(bars.length ? bars : [make("p", { className: "note", textContent: `Every ${mode === "shaped" ? "shaped reward" : mode} is 0.` })]));
  }

  // ---- the token in focus

  function facts(i) {
    const { data, run: current } = view, row = view.owner[i];
    return { text: view.spans[i].textContent || "(part of the next character)", id: data.id[i], position: i - row.start + 1, row,
      entropy: data.entropy[i], logProb: data.logProb[i], probability: Math.exp(data.logProb[i]),
      credit: current.schemes.map((each, k) => ({ label: each.label, shaped: data.shaped(k)[i], advantage: data.advantage(k)[i] })) };
  }

  function peers(i) {  // what the token's entropy is compared with, and in which words
    const row = view.owner[i], side = view.rows.filter((other) => other.correct === row.correct && view.group.counted[other.i]);
    const way = view.run.schemes[scheme()], others = way.scope === "batch" && way.compare !== "sequence" ? ", and those of the batch's other groups" : "";
    const which = row.correct ? "correct" : "wrong", position = i - row.start;
    if (!way.compare) return { elements: [], text: way.perCompletion ? "One value for the whole completion." : "" };
    if (way.compare === "sequence") return { elements: [row.element], text: `Compared with the ${row.length} tokens of its completion.` };
    if (way.compare === "matrix") {
      return { elements: [row.element.closest(".side")], text: `Compared with all ${side.reduce((n, other) => n + other.length, 0)} tokens of the ${which} completions${others}.` };
    }
    const alive = side.filter((other) => position < other.length);
    return { elements: alive.map((other) => view.spans[other.start + position]), text: `Compared with position ${position + 1} of the ${alive.length} ${which} completions that reach it${others}.` };
  }

  function show(i) {
    for (const element of document.querySelectorAll(".peer, .t.now")) element.classList.remove("peer", "now");
    view.now = i;
    const fact = facts(i), compared = peers(i), current = scheme();
    for (const element of compared.elements) element.classList.add("peer");
    view.spans[i].classList.add("now");
    const pairs = [["position", `${fact.position} of ${fact.row.length}`], ["completion", `${fact.row.i + 1}, ${fact.row.correct ? "correct (O+)" : "wrong (O−)"}`],
      ["entropy", `${fmt(fact.entropy)} nats`], ["log-prob", fmt(fact.logProb)], ["probability", fmt(fact.probability)], ["token id", String(fact.id)]];
    const list = make("dl", {}, ...pairs.flatMap(([name, text]) => {
      const value = make("dd", { textContent: text });
      value.dataset.fact = name;
      return [make("dt", { textContent: name }), value];
    }));
    const head = make("thead", {}, make("tr", {}, ...["", "shaped", "advantage"].map((text) => make("th", { textContent: text, className: text ? "n" : "", scope: "col" }))));
    const body = make("tbody", {}, ...fact.credit.map((each, k) => {
      const line = make("tr", {}, make("th", { textContent: each.label, scope: "row" }), make("td", { className: "n", textContent: fmt(each.shaped) }),
        make("td", { className: "n", textContent: fmt(each.advantage) }));
      if (k === current) line.setAttribute("aria-current", "true");
      return line;
    }));
    $("v-token").replaceChildren(make("h4", { textContent: fact.text, dir: "ltr" }), list, make("table", {}, head, body), make("p", { className: "note", textContent: compared.text }));
  }

  function focus(i) {
    for (const span of document.querySelectorAll("#v-tokens [tabindex='0']")) span.tabIndex = -1;
    const span = view.spans[i], fact = facts(i), credit = fact.credit[scheme()];
    span.tabIndex = 0;
    span.setAttribute("aria-label", `${fact.text}, position ${fact.position}, completion ${fact.row.i + 1}, ${fact.row.correct ? "correct" : "wrong"}, `
      + `entropy ${fmt(fact.entropy)}, log-prob ${fmt(fact.logProb)}, shaped reward ${fmt(credit.shaped)}, advantage ${fmt(credit.advantage)}`);
    span.focus();
  }

  // ---- what the user does

  const tokens = $("v-tokens");
  tokens.addEventListener("pointerover", (event) => { if (event.target.token !== undefined) show(event.target.token); });
  tokens.addEventListener("focusin", (event) => { if (event.target.token !== undefined) show(event.target.token); });
  tokens.addEventListener("click", (event) => { if (event.target.token !== undefined) focus(event.target.token); });
  tokens.addEventListener("keydown", (event) => {
    if (event.target.token === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    const i = event.target.token, row = view.owner[i], at = view.order.indexOf(row), last = row.start + row.length - 1;
    const beside = (other) => other && other.start + Math.min(i - row.start, other.length - 1);
    const to = { ArrowRight: Math.min(i + 1, last), ArrowLeft: Math.max(i - 1, row.start), ArrowDown: beside(view.order[at + 1]),
      ArrowUp: beside(view.order[at - 1]), Home: row.start, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    focus(to);
  });
  $("v-run").addEventListener("change", onRun);
  $("v-step").addEventListener("change", onStep);
  $("v-group").addEventListener("change", onGroup);
  for (const [id, by] of [["v-prev", -1], ["v-next", 1]]) {
    $(id).addEventListener("click", () => { $("v-group").selectedIndex += by; onGroup(); });
  }
  $("credit-tools").addEventListener("change", (event) => { if (event.target.name === "colour" || event.target.name === "scheme") colour(); });

  fill($("v-run"), runs.map((each) => each.label));
  onRun();
})();
