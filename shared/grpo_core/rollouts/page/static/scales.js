/* Numbers of charts: ticks, moving means, and the nearest point. */

const SMOOTH_FROM = 30; // points

const smoothingWindow = (points) => Math.max(3, Math.floor(points.length / 10));

function movingAverage(points) {
  const width = smoothingWindow(points);
  let sum = 0;
  return points.map(([x, y], at) => {
    sum += y - (at >= width ? points[at - width][1] : 0);
    return [x, sum / Math.min(at + 1, width)];
  });
}

/** Two to five round numbers at equal distances, between which both values are. */
function niceTicks(low, high) {
  if (low === high) return low === 0 ? [0, 1] : niceTicks(Math.min(0, low), Math.max(0, high));
  const span = high - low;
  const power = 10 ** Math.floor(Math.log10(span / 4));
  for (const factor of [1, 2, 5, 10, 20]) {
    const size = factor * power;
    const first = Math.floor(low / size + 1e-9);
    const last = Math.max(Math.ceil(high / size - 1e-9), first + 1);
    if (last - first > 4) continue;
    return Array.from({ length: last - first + 1 }, (_, at) => Number(((first + at) * size).toPrecision(12)));
  }
  return [low, high];
}

/** With as many decimals as the other ticks. */
function tickText(tick, ticks) {
  const size = ticks[1] - ticks[0];
  const largest = Math.max(...ticks.map(Math.abs));
  if (largest < 1e-3 || largest >= 1e5) return tick === 0 ? "0" : tick.toExponential().replaceAll("-", MINUS);
  return tick.toFixed(Math.max(0, -Math.floor(Math.log10(size) + 1e-9))).replace("-", MINUS);
}

/** The place of the point whose x is nearest. Args: points: at least one, in order of x */
function nearestPlace(points, x) {
  let [low, high] = [0, points.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle;
    else high = middle;
  }
  return x - points[low][0] <= points[high][0] - x ? low : high;
}

/** The smallest and the largest of many numbers. */
function rangeOf(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}
