// The credit viewer: shows one group's completions with every token coloured, and beside them the
// numbers of the selected token.
(() => {
  const source = document.getElementById("viewer-data");
  if (!source) return;
  const { runs } = JSON.parse(source.textContent);
  const $ = (id) => document.getElementById(id);
  const SHADES = 8;          // shades of a colour, from light to dark
  const LONG_GROUP = 8000;   // tokens; in longer groups, rows outside the window are not laid out
  let view = null;           // the group shown
  let requests = 0;

  const checked = (name) => document.querySelector(`input[name=${name}]:checked`).value;
  const scheme = () => Number(checked("scheme"));
  const run = () => runs[$("v-run").value];
  const step = () => run().steps[$("v-step").value];

  // Returns the values that determine the colours of the tokens.
  function values() {
    const mode = checked("colour");
    const { data, owner } = view;
    if (mode === "truth") return Float32Array.from(data.truth, (code, i) => due(code, owner[i].correct));
    return mode === "entropy" ? data.entropy : data[mode](scheme());
  }

  // ---- controls

  function onRun() {
    const { schemes, steps } = run();
    setOptions($("v-step"), steps.map((each) => `${each.step}`));
    const best = mostContrast(run());
    $("v-step").value = best.i;
    const previous = document.querySelector("input[name=scheme]:checked")?.dataset.label;
    const methods = schemes.map((each, i) => {
      const input = make("input", { type: "radio", name: "scheme", value: i });
      input.dataset.label = each.label;
      const note = each.trained && !each.label.endsWith("as trained") ? " (as trained)" : "";
      return make("label", {}, input, ` ${each.label}${note}`);
    });
    $("v-methods").replaceChildren($("v-methods").querySelector("legend"), ...methods);
    const same = schemes.findIndex((each) => each.label === previous);
    const selected = same >= 0 ? same : schemes.findIndex((each) => each.trained);
    document.querySelectorAll("input[name=scheme]")[selected].checked = true;
    $("v-truth").hidden = !run().truth;
    if (checked("colour") === "truth" && !run().truth) {
      document.querySelector("input[name=colour][value=shaped]").checked = true;
    }
    onStep(best.j);
  }

  function onStep(group = 0) {
    setOptions($("v-group"), step().groups.map(({ correct }, i) =>
      `${i + 1}: ${countTrue(correct)} of ${correct.length} correct`));
    $("v-group").value = group;
    onGroup();
  }

  async function onGroup() {
    const request = ++requests;
    const index = Number($("v-group").value);
    const current = run();
    const group = step().groups[index];
    $("v-prev").disabled = index === 0;
    $("v-next").disabled = index === step().groups.length - 1;
    const data = await unpack($(`packed-${group.packed}`).textContent, current.schemes.length);
    if (request !== requests) return;  // another group was requested meanwhile
    view = { run: current, group, data, rows: [], order: [], spans: [], owner: [], selected: -1 };
    let start = 0;
    group.lengths.forEach((length, i) => {
      view.rows.push({ start, length, correct: group.correct[i], i, ...turnsOf(data, start, length) });
      start += length;
    });
    drawGroup();
    colour();
  }

  // Returns the tokens of a completion that the policy drew, and the same by turns: what was read
  // from an environment lies between these.
  function turnsOf({ drawn }, start, length) {
    const turns = [];
    for (let i = start; i < start + length; i++) {
      if (!drawn[i]) continue;
      if (i === start || !drawn[i - 1]) turns.push([]);
      turns.at(-1).push(i);
    }
    return { drawn: turns.flat(), turns };
  }

  // ---- tokens

  function drawGroup() {
    const { group } = view;
    const bold = (textContent) => make("b", { textContent });
    $("v-prompt").replaceChildren(
      bold("Prompt  "), group.prompt, make("br"), bold("Answer  "), group.answer);
    const sides = [drawSide(true, "Correct, O+"), drawSide(false, "Wrong, O−")];
    $("v-tokens").classList.toggle("long", view.spans.length > LONG_GROUP);
    $("v-tokens").replaceChildren(...sides.filter(Boolean));
    if (view.order.length) view.spans[view.order[0].start].tabIndex = 0;
    const hint = "Point at a token, or select one with the arrow keys.";
    $("v-token").replaceChildren(make("p", { className: "note", textContent: hint }));
  }

  // Returns the section of the correct or of the wrong completions; null if there are none.
  function drawSide(correct, title) {
    const rows = view.rows.filter((row) => row.correct === correct);
    if (!rows.length) return null;
    const grid = make("div", {});
    grid.setAttribute("role", "grid");
    grid.setAttribute("aria-label", `${title}, token by token`);
    for (const row of rows) {
      row.element = drawRow(row);
      view.order.push(row);
      grid.append(row.element);
    }
    const heading = make("h4", {}, make("i"), `${title}: ${rows.length} of ${view.rows.length}`);
    return make("section", { className: `side ${correct ? "right" : "wrong"}` }, heading, grid);
  }

  function drawRow(row) {
    const { group } = view;
    const notes = [`reward ${withMinus(group.reward[row.i])}`];
    if (!group.finished[row.i]) notes.push("cut off");
    if (group.guided[row.i]) notes.push("by the guide");
    if (!group.valid[row.i]) notes.push("excluded");
    if (row.turns.length > 1) notes.push(`${row.turns.length} turns`);
    if (group.stops?.[row.i]) notes.push(group.stops[row.i].replace("_", " "));
    row.sums = make("span");
    const name = make("b", { textContent: `${row.correct ? "✓" : "✗"} ${row.i + 1}` });
    const header = make(
      "header", { role: "rowheader" }, name, `  ${notes.join(", ")}`, make("br"), row.sums);
    const element = make("div", { className: "row" }, header, drawTokens(row));
    element.setAttribute("role", "row");
    return element;
  }

  function drawTokens(row) {
    const { data, run: { pieces, breaks } } = view;
    const breaking = new Set(breaks);
    const flow = make("div", { className: "flow", dir: "ltr" });
    flow.setAttribute("role", "presentation");
    for (let i = row.start; i < row.start + row.length; i++) {
      const piece = data.piece[i];
      const span = make("span", { className: "t", tabIndex: -1, textContent: pieces[piece] });
      span.setAttribute("role", "gridcell");
      span.token = i;
      view.spans[i] = span;
      view.owner[i] = row;
      flow.append(span);
      if (breaking.has(piece)) flow.append(make("br"));
    }
    return flow;
  }

  // ---- colours

  function hueOf(mode, value) {
    if (mode === "entropy") return "ent";
    return value > 0 ? "plus" : value < 0 ? "minus" : "";
  }

  // Colours every token. The scale of each hue runs from the smallest to the largest absolute value.
  function colour() {
    if (!view) return;
    const mode = checked("colour");
    const numbers = values();
    const ranges = { plus: [Infinity, 0], minus: [Infinity, 0], ent: [0, 0] };
    const { drawn } = view.data;
    for (const value of numbers.filter((_, i) => drawn[i])) {
      const range = ranges[hueOf(mode, value)];
      const size = Math.abs(value);
      if (range) {
        range[0] = Math.min(range[0], size);
        range[1] = Math.max(range[1], size);
      }
    }
    const classes = {};  // built once: there may be a million tokens
    for (const hue of Object.keys(ranges)) {
      classes[hue] = Array.from({ length: SHADES + 1 }, (_, shade) => `t ${hue} q${shade}`);
    }
    numbers.forEach((value, i) => {
      if (!drawn[i]) {
        view.spans[i].className = "t read";
        return;
      }
      const hue = hueOf(mode, value);
      const [low, high] = ranges[hue] ?? [0, 0];
      const share = high - low > EVEN * high ? (Math.abs(value) - low) / (high - low) : 0.5;
      const shade = hue === "ent"
        ? Math.round(SHADES * share)
        : 1 + Math.round((SHADES - 1) * share);
      const code = view.data.truth[i];
      const mark = isWrong(code) ? " wrongly" : decides(code) ? " decides" : "";
      view.spans[i].className = (hue ? classes[hue][shade] : "t") + mark;
    });
    drawScales(mode, ranges);
    describe(numbers);
    if (view.selected >= 0) show(view.selected);
  }

  // Shows the mean of each completion, and a note about the group.
  function describe(numbers) {
    for (const row of view.rows) {
      const total = row.drawn.reduce((sum, i) => sum + numbers[i], 0);
      const mean = total / Math.max(row.drawn.length, 1);
      const read = row.length - row.drawn.length;
      const more = read ? ` and ${read} that it read` : "";
      row.sums.textContent = `${row.drawn.length} tokens${more}, mean ${format(mean)}`;
    }
    const { correct } = view.group;
    const right = countTrue(correct);
    const uniform = right === 0 ? "wrong" : right === correct.length ? "correct" : "";
    const warning = uniform ? `Every completion is ${uniform}: the group is not mixed.` : "";
    const { groups, prompts, step: number } = step();
    const shapes = checked("colour") === "shaped" && !uniform;
    const stored = `${groups.length} of the ${prompts} groups of step ${number} are stored token `
      + `by token, the most mixed first.`;
    const reasons = shapes ? [true, false].map((side) => evenReason(side, numbers)) : [];
    const marks = view.data.truth.some((code) => code)
      ? "Underlined tokens decide the verdict; those with a wavy line are wrong."
      : "";
    $("v-note").textContent = [warning, ...reasons, marks, stored].filter(Boolean).join(" ");
  }

  function evenReason(correct, numbers) {
    const rows = view.rows.filter((row) => row.correct === correct && view.group.valid[row.i]);
    const slices = (column) => rows.map((row) => row.drawn.map((i) => column[i]));
    const name = correct ? "correct" : "wrong";
    return whyEven(name, slices(numbers), slices(view.data.id), view.run.schemes[scheme()]);
  }

  function drawScales(mode, ranges) {
    const used = Object.entries(ranges).filter(([, [low, high]]) => high > 0 && low < Infinity);
    const scales = used.map(([hue, range]) => drawScale(mode, hue, range));
    const name = mode === "shaped" ? "shaped reward" : mode;
    const empty = make("p", { className: "note", textContent: `Every ${name} is 0.` });
    $("v-scale").replaceChildren(...(scales.length ? scales : [empty]));
  }

  function drawScale(mode, hue, [low, high]) {
    const title = {
      entropy: { ent: "Entropy, nats" },
      shaped: { plus: "Positive reward", minus: "Negative reward" },
      advantage: { plus: "Pushed up", minus: "Pushed down" },
      truth: { plus: "Decides: should be rewarded", minus: "Wrong: should be penalised" },
    }[mode][hue];
    const shades = [];
    for (let shade = hue === "ent" ? 0 : 1; shade <= SHADES; shade++) {
      shades.push(make("i", { className: `${hue} q${shade}` }));
    }
    const sign = hue === "minus" ? -1 : 1;
    const ends = high - low > EVEN * high
      ? [format(sign * low), format(sign * high)]
      : [`${format(sign * low)} throughout`];
    return make("div", {},
      make("span", { textContent: title }),
      make("span", { className: "ramp" }, ...shades),
      make("span", {}, ...ends.map((textContent) => make("span", { textContent }))));
  }

  // ---- the selected token

  function facts(i) {
    const { data, run: { schemes } } = view;
    const row = view.owner[i];
    return {
      text: view.spans[i].textContent || "(part of the next character)",
      id: data.id[i],
      position: i - row.start + 1,
      row,
      entropy: data.entropy[i],
      logProb: data.logProb[i],
      truth: data.truth[i],
      probability: Math.exp(data.logProb[i]),
      credit: schemes.map(({ label }, k) =>
        ({ label, shaped: data.shaped(k)[i], advantage: data.advantage(k)[i] })),
    };
  }

  // Returns the elements that the entropy of token i is compared with, and a sentence about them.
  function comparedWith(i) {
    const row = view.owner[i];
    if (!view.data.drawn[i]) {
      return { elements: [], text: "The policy has read this, and not written it." };
    }
    const { compare, scope, perCompletion } = view.run.schemes[scheme()];
    if (!compare) {
      return { elements: [], text: perCompletion ? "One value for the entire completion." : "" };
    }
    if (compare === "sequence") {
      const text = `Compared with the ${row.drawn.length} tokens of its completion.`;
      return { elements: [row.element], text };
    }
    const side = view.rows.filter(
      (other) => other.correct === row.correct && view.group.valid[other.i]);
    const kind = row.correct ? "correct" : "wrong";
    const more = scope === "batch" ? ", and those of the other groups in the batch" : "";
    if (compare === "matrix") {
      const count = side.reduce((sum, other) => sum + other.drawn.length, 0);
      const text = `Compared with all ${count} tokens of the ${kind} completions${more}.`;
      return { elements: [row.element.closest(".side")], text };
    }
    const turn = row.turns.findIndex((tokens) => tokens.includes(i));
    const inTurn = compare === "turn";
    const position = (inTurn ? row.turns[turn] : row.drawn).indexOf(i);
    const place = (other) => (inTurn ? other.turns[turn] ?? [] : other.drawn)[position];
    const peers = side.map(place).filter((token) => token !== undefined);
    const where = inTurn ? `position ${position + 1} of turn ${turn + 1}` : `position ${position + 1}`;
    return {
      elements: peers.map((token) => view.spans[token]),
      text: `Compared with ${where} of the ${peers.length} ${kind} completions that reach it${more}.`,
    };
  }

  function show(i) {
    for (const element of document.querySelectorAll(".peer, .t.now")) {
      element.classList.remove("peer", "now");
    }
    view.selected = i;
    const fact = facts(i);
    const compared = comparedWith(i);
    for (const element of compared.elements) element.classList.add("peer");
    view.spans[i].classList.add("now");
    $("v-token").replaceChildren(
      make("h4", { textContent: fact.text, dir: "ltr" }),
      drawFacts(fact),
      drawCredit(fact.credit),
      make("p", { className: "note", textContent: compared.text }));
  }

  function drawFacts(fact) {
    const side = fact.row.correct ? "correct (O+)" : "wrong (O−)";
    const pairs = [
      ["position", `${fact.position} of ${fact.row.length}`],
      ["completion", `${fact.row.i + 1}, ${side}`],
      ["entropy", `${format(fact.entropy)} nats`],
      ["log-prob", format(fact.logProb)],
      ["probability", format(fact.probability)],
      ["token id", String(fact.id)],
      ...(view.run.truth ? [["truth", truthName(fact.truth)]] : []),
    ];
    return make("dl", {}, ...pairs.flatMap(([name, textContent]) => {
      const value = make("dd", { textContent });
      value.dataset.fact = name;
      return [make("dt", { textContent: name }), value];
    }));
  }

  function drawCredit(credit) {
    const heads = ["", "shaped", "advantage"].map((textContent) =>
      make("th", { textContent, className: textContent ? "n" : "", scope: "col" }));
    const current = scheme();
    const cell = (value) => make("td", { className: "n", textContent: format(value) });
    const rows = credit.map(({ label, shaped, advantage }, k) => {
      const name = make("th", { textContent: label, scope: "row" });
      const row = make("tr", {}, name, cell(shaped), cell(advantage));
      if (k === current) row.setAttribute("aria-current", "true");
      return row;
    });
    const head = make("thead", {}, make("tr", {}, ...heads));
    return make("table", {}, head, make("tbody", {}, ...rows));
  }

  function focus(i) {
    for (const span of document.querySelectorAll("#v-tokens [tabindex='0']")) span.tabIndex = -1;
    const span = view.spans[i];
    const fact = facts(i);
    const { shaped, advantage } = fact.credit[scheme()];
    span.tabIndex = 0;
    span.setAttribute("aria-label", [
      fact.text,
      `position ${fact.position}`,
      `completion ${fact.row.i + 1}`,
      fact.row.correct ? "correct" : "wrong",
      `entropy ${format(fact.entropy)}`,
      `log-prob ${format(fact.logProb)}`,
      ...(view.run.truth ? [`truth ${truthName(fact.truth)}`] : []),
      `shaped reward ${format(shaped)}`,
      `advantage ${format(advantage)}`,
    ].join(", "));
    span.focus();
  }

  // ---- events

  const tokens = $("v-tokens");
  const isToken = (element) => element.token !== undefined;
  for (const type of ["pointerover", "focusin"]) {
    tokens.addEventListener(type, ({ target }) => { if (isToken(target)) show(target.token); });
  }
  tokens.addEventListener("click", ({ target }) => { if (isToken(target)) focus(target.token); });
  tokens.addEventListener("keydown", (event) => {
    if (!isToken(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
    const i = event.target.token;
    const row = view.owner[i];
    const at = view.order.indexOf(row);
    const last = row.start + row.length - 1;
    const samePosition = (other) =>
      other && other.start + Math.min(i - row.start, other.length - 1);
    const to = {
      ArrowRight: Math.min(i + 1, last),
      ArrowLeft: Math.max(i - 1, row.start),
      ArrowDown: samePosition(view.order[at + 1]),
      ArrowUp: samePosition(view.order[at - 1]),
      Home: row.start,
      End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    focus(to);
  });
  $("v-run").addEventListener("change", onRun);
  $("v-step").addEventListener("change", () => onStep());
  $("v-group").addEventListener("change", onGroup);
  for (const [id, offset] of [["v-prev", -1], ["v-next", 1]]) {
    $(id).addEventListener("click", () => {
      $("v-group").selectedIndex += offset;
      onGroup();
    });
  }
  $("credit-tools").addEventListener("change", ({ target }) => {
    if (target.name === "colour" || target.name === "scheme") colour();
  });

  setOptions($("v-run"), runs.map((each) => each.label));
  onRun();
})();
