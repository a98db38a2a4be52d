// The chart of the page of `ckptkit verify --html`: the numbers are those of the page's JSON, which is DATA (filter.js).
// Names from it become text, never HTML.

const PARTS = {
  embedding: "circle", attention: "square", mlp: "diamond", block: "circle", norm: "pentagon", logits: "star",
};

const FONT_SIZE = 13;
const MARGIN = { l: 74, r: 16, t: 48, b: 54 };

// Left to itself, Plotly offers a button that sends the chart to its makers' server.
const CONFIG = {
  responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};

// Return a text for Plotly, which reads a few HTML tags and entities in its own.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// Return a number with all its digits, as `--json` spells it.
function exact(number) {
  const small = typeof number === "number" && number !== 0 && Math.abs(number) < 1e-4;
  return small ? number.toExponential().replace(/e-(\d)$/, "e-0$1") : String(number);
}

function shorten(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}\u2026` : text;
}

// Return the rows to draw, in the order of the network; without level layers, the logits of each input.
function chartRows() {
  if (DATA.layers) {
    return DATA.layers.rows;
  }
  const inputs = DATA.forward ? DATA.forward.inputs : [];
  return inputs.filter((row) => !row.skipped).map((row) => ({ layer: null, part: "logits", relative: null, ...row }));
}

// Return where the scale ends: zeros are drawn at its lower end, what is not finite at its upper one.
function ends(rows) {
  const numbers = rows.flatMap((row) => [row.relative, row.bound]).filter((x) => typeof x === "number" && x > 0);
  const logs = numbers.length ? numbers.map(Math.log10) : [-8, -6];
  return [Math.floor(Math.min(...logs) - 0.4), Math.ceil(Math.max(...logs) + 0.4)];
}

function height(row, [low, high]) {
  if (typeof row.relative !== "number") {
    return 10 ** high;
  }
  return row.relative > 0 ? row.relative : 10 ** low;
}

function hoverText(row) {
  const lines = [`<b>${plain(row.name)}</b>`];
  const facts = { relative: row.relative ?? "not a finite number", bound: row.bound, sensitivity: row.sensitivity,
    "max |a - b|": row.max_abs, "max |a|": row.largest, tokens: row.tokens };
  for (const [name, value] of Object.entries(facts)) {
    if (value !== undefined && value !== null) {
      lines.push(`${plain(name)}: ${plain(exact(value))}`);
    }
  }
  if (row.wrong) {
    lines.push(row.wrong === true ? "over the bound" : plain(shorten(row.wrong, 90)));
  }
  return lines.join("<br>");
}

function symbol(row) {
  if (typeof row.relative !== "number") {
    return "x";
  }
  return row.relative > 0 ? PARTS[row.part] || "circle" : "triangle-down-open";
}

function traces(rows, scale, color) {
  const numbered = rows.map((row, index) => ({ ...row, index }));
  const bound = {
    name: "bound", mode: "lines", hoverinfo: "skip",
    line: { color: color("quiet"), dash: "dot", width: 1.5, shape: "hvh" },
    x: numbered.map((row) => row.index), y: numbered.map((row) => (row.bound > 0 ? row.bound : null)),
  };
  if (rows.length === 1) {
    bound.x = [-0.5, 0.5];
    bound.y = [bound.y[0], bound.y[0]];
  }
  const parts = [...new Set(rows.map((row) => row.part))].map((part) => {
    const own = numbered.filter((row) => row.part === part);
    return {
      name: plain(part), mode: DATA.layers && own.length > 1 ? "lines+markers" : "markers",
      x: own.map((row) => row.index), y: own.map((row) => height(row, scale)),
      customdata: own.map(hoverText), hovertemplate: "%{customdata}<extra></extra>",
      line: { color: color(part), width: 1 },
      marker: { color: color(part), size: rows.length > 60 ? 6 : 9, symbol: own.map(symbol) },
    };
  });
  const wrong = numbered.filter((row) => row.wrong);
  const [size, width] = rows.length > 60 ? [9, 1] : [15, 2];
  const rings = {
    name: "over the bound", mode: "markers", hoverinfo: "skip",
    x: wrong.map((row) => row.index), y: wrong.map((row) => height(row, scale)),
    marker: { color: color("bad"), size, symbol: "circle-open", line: { width } },
  };
  return wrong.length ? [bound, rings, ...parts] : [bound, ...parts];
}

// Return marks for the x axis: layers, as many as there is room for, or the inputs' names.
function ticks(rows) {
  if (!DATA.layers) {
    return rows.map((row, index) => [index, plain(shorten(row.name, 24))]);
  }
  const first = new Map();
  rows.forEach((row, index) => {
    if (row.layer !== null && !first.has(row.layer)) {
      first.set(row.layer, index);
    }
  });
  const step = Math.ceil(first.size / 16);
  return [...first].filter(([layer], at) => at % step === 0).map(([layer, index]) => [index, String(layer)]);
}

// Return a function that tells how wide a text is in the chart's font, in pixels.
function ruler(color) {
  const context = document.createElement("canvas").getContext("2d");
  context.font = `${FONT_SIZE}px ${color("sans")}`;
  return (text) => context.measureText(text).width;
}

// Return the words of the first divergence in lines that fit in `room` pixels: a screen may be narrow.
function firstWords(name, room, width) {
  const words = [`first divergence: ${shorten(name, 60)}`];
  if (width(words[0]) <= room) {
    return words;
  }
  let length = Math.min(name.length, 60);
  while (length > 1 && width(shorten(name, length)) > room) {
    length -= 1;
  }
  return ["first divergence:", shorten(name, length)];
}

// Return the line that marks the first divergence, and its words, which begin or end there where they have the room.
function firstMark(rows, color, room) {
  const at = DATA.layers ? rows.findIndex((row) => row.name === DATA.layers.first) : -1;
  if (at < 0) {
    return {};
  }
  const line = { color: color("bad"), width: 1.5 };
  const width = ruler(color);
  const words = firstWords(rows[at].name, room, width);
  const [long, x] = [Math.max(...words.map(width)), (room * (at + 0.7)) / (rows.length + 0.4)];
  const fits = { left: x + long <= room, right: x - long >= 0 };
  const side = ["left", "right"].sort((one) => (at < rows.length / 2 === (one === "left") ? -1 : 1)).find((s) => fits[s]);
  return {
    shapes: [{ type: "line", xref: "x", yref: "paper", x0: at, x1: at, y0: 0, y1: 1, line }],
    annotations: [{
      xref: side ? "x" : "paper", x: side ? at : 0.5, xanchor: side || "center", align: side || "center",
      yref: "paper", y: 1, yanchor: "bottom", showarrow: false, borderpad: 0,
      text: words.map(plain).join("<br>"), font: { color: color("bad"), size: FONT_SIZE },
    }],
  };
}

function layout(rows, scale, color, width) {
  const marks = ticks(rows);
  const axis = {
    color: color("quiet"), gridcolor: color("line"), linecolor: color("line"), zeroline: false, tickfont: { size: 12 },
  };
  return {
    paper_bgcolor: color("page"), plot_bgcolor: color("page"), height: 430, hovermode: "closest", dragmode: "zoom",
    font: { family: color("sans"), size: FONT_SIZE, color: color("text") },
    margin: MARGIN,
    legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom" },
    hoverlabel: {
      bgcolor: color("card"), bordercolor: color("line"), align: "left",
      font: { color: color("text"), family: color("mono"), size: 12 },
    },
    xaxis: {
      ...axis, title: { text: DATA.layers ? "layer" : "input" }, range: [-0.7, rows.length - 0.3], automargin: true,
      tickvals: marks.map(([at]) => at), ticktext: marks.map(([, text]) => text),
    },
    yaxis: {
      ...axis, title: { text: "relative distance" }, type: "log", range: [scale[0] - 0.15, scale[1] + 0.15],
      dtick: Math.ceil((scale[1] - scale[0]) / 9), exponentformat: "power", showexponent: "all",
    },
    ...firstMark(rows, color, width - MARGIN.l - MARGIN.r),
  };
}

// Plotly's script travels packed; the page's security policy knows it by its digest.
async function loadPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

function draw() {
  const figure = document.getElementById("chart");
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim() || style.getPropertyValue("--logits").trim();
  const rows = chartRows();
  const scale = ends(rows);
  return Plotly.react(figure, traces(rows, scale, color), layout(rows, scale, color, figure.clientWidth), CONFIG);
}

async function startChart() {
  const figure = document.getElementById("chart");
  if (!figure) {
    return;
  }
  if (chartRows().length === 0) {
    figure.className = "without";
    figure.textContent = "No input was compared.";
    return;
  }
  try {
    await loadPlotly();
    figure.replaceChildren();
    await draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    window.addEventListener("resize", draw); // Plotly's own answer leaves the mark's words where they were
  } catch (error) {
    figure.className = "without";
    figure.textContent = `The chart could not be drawn (${error}). The table below has its numbers.`;
  }
  figure.dataset.done = "yes";
}

startChart();
