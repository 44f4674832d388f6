const charts = JSON.parse(document.getElementById("charts").textContent);
const words = value => {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(+value.toPrecision(5));
};
const nearest = (points, x) => {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
};
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = charts[figure.dataset.chart];
  const field = figure.querySelector(".field"), cursor = figure.querySelector(".cursor"), values = figure.querySelector(".values");
  const show = event => {
    const box = field.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const wanted = chart.left + share * (chart.right - chart.left);
    const found = chart.lines.map(line => nearest(line.points, wanted));
    const x = found.reduce((best, point) => Math.abs(point[0] - wanted) < Math.abs(best - wanted) ? point[0] : best, found[0][0]);
    const place = 100 * (x - chart.left) / ((chart.right - chart.left) || 1);
    cursor.style.left = place + "%";
    values.style.left = place < 50 ? `calc(${place}% + 10px)` : "auto";
    values.style.right = place < 50 ? "auto" : `calc(${100 - place}% + 10px)`;
    values.replaceChildren(`iteration ${Math.round(x)}`);
    chart.lines.forEach((line, index) => {
      const row = document.createElement("div"), dot = document.createElement("i");
      dot.className = "c" + line.mark;
      dot.textContent = "● ";
      const at = Math.round(found[index][0]) === Math.round(x) ? "" : ` (at ${Math.round(found[index][0])})`;
      row.append(dot, `${line.name} ${words(found[index][1])}${at}`);
      values.append(row);
    });
    cursor.style.display = values.style.display = "block";
  };
  const hide = () => { cursor.style.display = values.style.display = "none"; };
  field.addEventListener("pointermove", show);
  field.addEventListener("pointerdown", show);
  field.addEventListener("pointerleave", hide);
}
