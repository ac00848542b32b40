// The numbers of the credit viewer: how they are unpacked and how they are written.
// piece, id, entropy, log-prob, truth, drawn; the columns of the schemes follow
const FIXED_COLUMNS = 6;
const EVEN = 1e-3;        // relative differences below this are numerical noise

// Unpacks a text of `pack` in viewer.py into its columns.
async function unpack(text, schemes) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const grouped = new Uint8Array(await new Response(stream).arrayBuffer());
  const words = grouped.length / 4;
  const joined = new Uint8Array(grouped.length);
  for (let rank = 0; rank < 4; rank++) {
    const from = rank * words;
    for (let i = 0; i < words; i++) joined[4 * i + rank] = grouped[from + i];
  }
  const size = words / (FIXED_COLUMNS + 2 * schemes);
  const column = (type, i) => new type(joined.buffer, 4 * i * size, size);
  return {
    piece: column(Int32Array, 0),
    id: column(Int32Array, 1),
    entropy: column(Float32Array, 2),
    logProb: column(Float32Array, 3),
    truth: column(Int32Array, 4),
    drawn: column(Int32Array, 5),
    shaped: (scheme) => column(Float32Array, FIXED_COLUMNS + 2 * scheme),
    advantage: (scheme) => column(Float32Array, FIXED_COLUMNS + 2 * scheme + 1),
  };
}

// The truth of a token, from its code: see logs/truth.py.
const TRUTHS = ["unknown", "inert", "filler", "copied", "decisive"];
const decides = (code) => (code & 7) >= 3;
const isWrong = (code) => code >= 8;
const truthName = (code) => TRUTHS[code & 7] + (isWrong(code) ? ", wrong" : "");

// What a token should get: a reward if it decides and its completion is correct, a penalty if it is
// wrong and its completion is.
const due = (code, correct) => correct ? Number(decides(code)) : -Number(isWrong(code));

const withMinus = (value) => String(value).replace("-", "−");

function format(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const short = value.toPrecision(4);
  return withMinus(size >= 1e4 || size < 1e-4 ? String(Number(short)) : short);
}

// Returns a new element with these properties and children.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Replaces the options of a select element.
function setOptions(select, labels) {
  const option = (textContent, value) => make("option", { value, textContent });
  select.replaceChildren(...labels.map(option));
}

const countTrue = (flags) => flags.filter(Boolean).length;

// Returns why all tokens of one side of a group have the same shaped reward; "" if they differ.
// `name` is "correct" or "wrong"; `rewards` and `ids` have an array of tokens per completion.
function whyEven(name, rewards, ids, { compare, scope, perCompletion }) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of rewards.flatMap((each) => [...each])) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!(high - low <= EVEN * Math.max(Math.abs(low), Math.abs(high)))) return "";
  const same = `The reward is ${format(high)} for every ${name} token:`;
  if (!scope) return `${same} this algorithm does not shape rewards by entropy.`;
  if (high === 0) return `${same} this algorithm shapes only the other side.`;
  if (perCompletion) return `${same} the ${name} completions have the same mean entropy.`;
  if (compare === "position" && scope === "group") {
    if (ids.length === 1) return `${same} no other completion of the group is ${name}.`;
    if (ids.every((each) => each.join() === ids[0].join())) {
      return `${same} the ${ids.length} ${name} completions are the same text, so their entropies `
        + `at a position are equal, and method 1 compares only equal positions. `
        + `Methods 2 and 3 compare others.`;
    }
  }
  return `${same} the entropies that it is compared with are equal.`;
}

// The number of correct or of wrong completions, whichever is smaller.
const smallerSide = ({ correct }) =>
  Math.min(countTrue(correct), correct.length - countTrue(correct));

// The step and the group to open: one whose credit, by the scheme that trained the run, differs
// between tokens on both sides; otherwise on one; otherwise the most mixed group. Among equals the
// one with the largest differences, or the last one.
function mostContrast({ schemes, steps }) {
  const trained = Math.max(schemes.findIndex((each) => each.trained), 0);
  const all = steps.flatMap(({ groups }, i) => groups.map((group, j) => {
    const uneven = group.spread[trained].filter((size) => size > EVEN);
    const mixed = smallerSide(group);
    const total = uneven.reduce((sum, size) => sum + size, 0);
    return { i, j, rank: mixed ? [uneven.length, total, mixed] : [0, 0, 0] };
  }));
  const lower = (a, b) => {
    const k = a.rank.findIndex((value, i) => value !== b.rank[i]);
    return k < 0 || a.rank[k] < b.rank[k];
  };
  return all.reduce((best, each) => lower(best, each) ? each : best);
}
