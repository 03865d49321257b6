/** Elements made by code. What comes from a trace goes in as text, so it never becomes markup. */

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id, which the page has. */
export const byId = (id) => document.getElementById(id);

/** An HTML element. Attributes that are null or false are left out, functions are listeners. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
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

/** Set an element's text where it differs: what has not changed is not announced again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show or hide an element with a message; an empty one hides it. */
export function tell(element, text) {
  setText(element, text);
  element.hidden = !text;
}

/** Have screen readers say something. */
export function say(text) {
  setText(byId("say"), text);
}
