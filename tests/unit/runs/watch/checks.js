/* What everybody needs of a page: names, sizes and contrasts. Each function returns what fails. */

const seen = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true })
  && element.getClientRects().length && !element.closest(".only-said");
const told = (element) => `${element.tagName.toLowerCase()}#${element.id}.${element.getAttribute("class")} ${element.textContent.slice(0, 30)}`;

function smallTargets(least = 44) {
  const found = [...document.querySelectorAll("button, select, input, a, summary")].filter(seen);
  return found.filter((element) => {
    const target = element.matches("input[type=checkbox], input[type=radio]") ? element.closest("label") : element;
    const { width, height } = target.getBoundingClientRect();
    return width < least - 0.5 || height < least - 0.5;
  }).map(told);
}

function unnamed() {
  const named = (element) => element.labels?.length || element.getAttribute("aria-label")
    || element.getAttribute("aria-labelledby") || element.textContent.trim();
  return [...document.querySelectorAll("button, select, input, a, summary, progress, svg[role], [role=radiogroup], table")]
    .filter((element) => seen(element) && !named(element)).map(told);
}

const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });

/** Red, green, blue and alpha. */
function rgba(colour, below = null) {
  pixel.clearRect(0, 0, 1, 1);
  for (const one of [below, colour].filter(Boolean)) {
    pixel.fillStyle = one;
    pixel.fillRect(0, 0, 1, 1);
  }
  return [...pixel.getImageData(0, 0, 1, 1).data];
}

function luminance([red, green, blue]) {
  const [r, g, b] = [red, green, blue].map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function background(element) {
  for (let one = element; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if (rgba(colour)[3] === 255) return colour;
  }
  return "white";
}

function hardToRead(least = 4.5) {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !seen(element) || element.closest("script, noscript, :disabled, label:has(:disabled)")) continue;
    const below = background(element);
    const style = getComputedStyle(element);
    const colour = element instanceof SVGElement ? style.fill : style.color;
    const [one, other] = [luminance(rgba(below)), luminance(rgba(colour, below))].sort((a, b) => b - a);
    const contrast = (one + 0.05) / (other + 0.05);
    if (contrast < least) found.add(`${contrast.toFixed(2)} ${told(element)}`);
  }
  return [...found];
}
