/** Creates elements. Names from a trace are inserted as text, so they cannot become markup. */

const SVG = "http://www.w3.org/2000/svg";

/** Return the element with this id, which must exist. */
export const byId = (id) => document.getElementById(id);

/** Create an HTML element. Attributes that are null or false are skipped, functions are listeners. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set an element's text if it differs, so that screen readers do not repeat unchanged text. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show an element with a message; an empty message hides it. */
export function showMessage(element, text) {
  setText(element, text);
  element.hidden = !text;
}

/** Announce a text to screen readers. */
export function announce(text) {
  setText(byId("announcer"), text);
}
