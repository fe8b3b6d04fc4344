/* The curves of the report. */

/** Args: onStep: called with the step that one clicks at */
function showCurves(curves, onStep) {
  const drawable = curves
    .map((curve) => ({ ...curve, points: curve.points.filter(([, y]) => y !== null).map(([x, y]) => [x, y, x]) }))
    .filter((curve) => curve.points.length);
  if (!drawable.length) return;
  const [first, last] = rangeOf(drawable.flatMap((curve) => curve.points.map(([x]) => x)));
  const charts = drawable.map((curve) => {
    const chart = new Chart(curve);
    chart.show([{ style: null, points: curve.points, interval: curve.interval }], { ...STEPS, first, last });
    connect(chart, () => charts, ({ x }) => onStep(x));
    return chart;
  });
  byId("curves").replaceChildren(...charts.map((chart) => chart.figure));
  const width = Math.max(...drawable.map((curve) => smoothingWindow(curve.points)));
  const smooth = drawable.some((curve) => curve.points.length >= SMOOTH_FROM);
  byId("curves-hint").textContent = "The x axis is the training step. Click a curve to see the rollouts of a step."
    + (smooth ? ` Thin lines: each step. Thick lines: mean of ${width} steps.` : "");
  byId("curves-section").hidden = false;
}
