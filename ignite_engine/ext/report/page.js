const source = document.getElementById("charts");
let charts = source ? JSON.parse(source.textContent) : [];
let runs = source ? JSON.parse(source.dataset.runs) : [];
let figures = [...document.querySelectorAll("figure[data-chart]")];
const control = name => document.querySelector(`[data-control="${name}"]`);
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const words = value => {
  if (value == null) return "";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(3).replace(/\.?0*e\+?/, "e") : String(+value.toPrecision(5));
};
const duration = hours => {
  const seconds = Math.round(hours * 3600);
  if (seconds < 120) return +(hours * 3600).toPrecision(3) + " s";
  return seconds < 7200 ? Math.round(seconds / 60) + " min" : +hours.toPrecision(3) + " h";
};

// From iterations to what the x axis shows; null where a run does not tell.
const between = (pairs, x) => {
  let low = 0, high = pairs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (pairs[middle][0] <= x) low = middle; else high = middle; }
  const [a, b] = [pairs[low], pairs[high]];
  return a[0] === b[0] ? a[1] : a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0]);
};
const axes = {
  iteration: { title: "iteration", of: (run, x) => x, show: x => Number.isInteger(x) ? x.toLocaleString("en") : words(x) },
  epoch: { title: "epoch", of: (run, x) => run.epoch ? x / run.epoch : null, show: words },
  time: { title: "time in training", of: (run, x) => run.hours.length ? between(run.hours, x) : null, show: duration },
};

const FEW = 30;  // points that are marked one by one, and not smoothed
let zoom = null, drawn = [], copying = false;
const settings = () => ({
  axis: axes[control("axis")?.value ?? "iteration"],
  logX: control("logx")?.checked ?? false,
  y: control("y")?.value ?? "auto",
  smoothing: +(control("smoothing")?.value ?? 0),
});

const smoothed = (values, weight) => {
  let mean = 0, total = 0;
  return values.map(value => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return mean / total;
  });
};

// uPlot draws lines over one list of x: null where a line has no point.
const table = (lines, { axis, logX }) => {
  const columns = lines.map(line => {
    const column = new Map();
    for (const [at, value] of line.points) {
      const x = axis.of(runs[line.run], at);
      if (x != null && !(logX && x <= 0)) column.set(x, value);
    }
    return column;
  });
  const xs = [...new Set(columns.flatMap(column => [...column.keys()]))].sort((a, b) => a - b);
  return [xs, ...columns.map(column => xs.map(x => column.get(x) ?? null))];
};

const nearest = (values, index) => {
  for (let step = 0; step < values.length; step++) {
    if (values[index - step] != null) return index - step;
    if (values[index + step] != null) return index + step;
  }
  return null;
};

const marks = (plot, chart, { axis }) => {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("warn");
  ctx.lineWidth = devicePixelRatio;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  ctx.setLineDash([3 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
  let free = -Infinity;
  for (const run of new Set(chart.lines.map(line => line.run))) {
    for (const [at, text] of runs[run].marks) {
      const value = axis.of(runs[run], at);
      const x = value == null ? NaN : Math.round(plot.valToPos(value, "x", true));
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      const width = ctx.measureText(text).width, left = Math.min(x + 4, bbox.left + bbox.width - width);
      if (left > free) { ctx.fillText(text, left, bbox.top + 10 * devicePixelRatio); free = left + width + 8; }
    }
  }
  ctx.restore();
};

const draw = figure => {
  const chart = charts[figure.dataset.chart], asked = settings(), { axis, logX } = asked;
  const field = figure.querySelector(".plot");
  const logY = asked.y === "log" || (asked.y === "auto" && chart.log);
  let [xs, ...columns] = table(chart.lines, asked);
  if (logY) columns = columns.map(column => column.map(value => value > 0 ? value : null));
  const faint = asked.smoothing && !chart.exact ? columns : [];
  if (faint.length) columns = columns.map((column, index) => chart.lines[index].points.length > FEW ? smoothed(column, asked.smoothing) : column);
  const series = chart.lines.map((line, index) => {
    const ink = () => colour("c" + line.mark);
    return {
      label: line.name, stroke: ink, width: 1.6, spanGaps: true, dash: line.dashed ? [6, 4] : undefined,
      points: { show: line.points.length <= FEW, size: 5, fill: ink },
      value: (plot, value, at, place) => {
        const values = columns[index];
        return words(values[place ?? values.findLastIndex(each => each != null)]);
      },
    };
  });
  const behind = faint.map((_, index) => ({
    class: "raw", stroke: () => colour("c" + chart.lines[index].mark) + "55", width: 1, spanGaps: true, points: { show: false },
  }));
  const label = { stroke: () => colour("faint"), font: "12px system-ui, sans-serif", ticks: { show: false }, border: { show: false } };
  const powers = (plot, all) => all.map(each => Number.isInteger(+Math.log10(each).toFixed(6)) ? each : null);
  const grid = { stroke: () => colour("rule"), width: 1, ...(logY ? { filter: powers } : {}) };
  const ends = [xs[0], xs[xs.length - 1]];
  const plot = new uPlot({
    width: field.clientWidth, height: 230, legend: { live: true },
    cursor: {
      sync: { key: "pages", setSeries: false }, drag: { x: true, y: false, dist: 8 }, points: { size: 7 },
      dataIdx: (plot, at, index) => at == 0 ? index : nearest(plot.data[at], index) ?? index,
      bind: { dblclick: () => () => { reset(); return null; } },
    },
    scales: {
      x: { time: false, distr: logX ? 3 : 1, range: (plot, low, high) => low === high ? [low - 1, high + 1] : [low, high] },
      y: logY ? { distr: 3 } : { range: (plot, low, high) => {
        if (low == null) return [0, 1];
        if (!(high > low)) return [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
        const margin = (high - low) * .06, bottom = chart.zero && low >= 0 && !zoom ? 0 : low - margin;
        return [bottom, high + margin];
      } },
    },
    axes: [
      { ...label, grid: { show: false }, size: 28, gap: 4, space: 56, values: (plot, all) => all.map(each => each == null ? "" : axis.show(each)) },
      { ...label, grid, size: 60, gap: 6, values: (plot, all) => all.map(words) },
    ],
    series: [{ label: axis.title, value: (plot, x) => x == null ? "" : axis.show(x) }, ...behind, ...series],
    hooks: {
      draw: [plot => marks(plot, chart, asked)],
      setScale: [(plot, key) => {
        const { min, max } = plot.scales.x, [left, right] = zoom ?? extent();  // it is told later, also of what we have set
        if (key === "x" && plot.status === 1 && (min !== left || max !== right)) zoomTo([min, max], plot);
      }],
      setSeries: [(plot, at, change) => {
        if (copying || change.show == null || runs.length < 2) return;
        eachOther(null, other => other.series.forEach((each, index) => {
          if (index && each.label === plot.series[at].label) other.setSeries(index, { show: change.show });
        }));
      }],
    },
  }, [xs, ...faint, ...columns], field);
  plot.ends = ends;
  fingers(plot);
  return plot;
};

const eachOther = (plot, act) => {
  copying = true;
  for (const other of drawn) if (other !== plot) act(other);
  copying = false;
};
const zoomTo = (span, from) => {
  zoom = span;
  eachOther(from, other => other.setScale("x", { min: span[0], max: span[1] }));
  document.body.classList.toggle("zoomed", zoom != null);
};
const extent = () => {
  const left = Math.min(...drawn.map(plot => plot.ends[0] ?? Infinity)), right = Math.max(...drawn.map(plot => plot.ends[1] ?? -Infinity));
  return [left, right];
};
const reset = () => {
  const [min, max] = extent();
  zoom = null;
  eachOther(null, plot => plot.setScale("x", { min, max }));
  document.body.classList.remove("zoomed");
};

// A finger that moves sideways selects, as the mouse does; up and down it scrolls.
const fingers = plot => {
  const pass = type => event => {
    if (event.pointerType === "mouse") return;
    const { clientX, clientY } = event;
    plot.over.dispatchEvent(new MouseEvent(type, { clientX, clientY, movementX: 1, bubbles: true }));
  };
  for (const [from, to] of [["pointerdown", "mousedown"], ["pointermove", "mousemove"], ["pointerup", "mouseup"], ["pointercancel", "mouseup"]])
    plot.over.addEventListener(from, pass(to));
};

const drawAll = () => {
  const hidden = new Set(drawn.flatMap(plot => plot.series.filter(each => each.show === false).map(each => each.label)));
  for (const plot of drawn) plot.destroy();
  const wanted = control("chart")?.value ?? "";
  for (const figure of figures) figure.hidden = wanted !== "" && charts[figure.dataset.chart].title !== wanted;
  const shown = figures.filter(figure => !figure.hidden);
  if (wanted !== "") for (const figure of shown) figure.closest("details:not([open])")?.setAttribute("open", "");
  drawn = shown.filter(figure => !figure.closest("details:not([open])")).map(draw);
  if (runs.length > 1) eachOther(null, plot => plot.series.forEach((each, index) => {
    if (index && hidden.has(each.label)) plot.setSeries(index, { show: false });
  }));
  const [min, max] = zoom ?? extent();
  eachOther(null, plot => plot.setScale("x", { min, max }));
};

let due = 0;
const later = () => { cancelAnimationFrame(due); due = requestAnimationFrame(drawAll); };
for (const each of document.querySelectorAll("[data-control]")) {
  each.addEventListener("input", () => { if (each.dataset.control === "axis" || each.dataset.control === "logx") { zoom = null; document.body.classList.remove("zoomed"); } later(); });
}
document.querySelector("[data-reset]")?.addEventListener("click", reset);
for (const folded of document.querySelectorAll("[data-folded]")) folded.addEventListener("toggle", later);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
let width = 0;
new ResizeObserver(([main]) => { if (main.contentRect.width !== width) { width = main.contentRect.width; later(); } }).observe(document.querySelector("main"));
