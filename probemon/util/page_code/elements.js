// Elements of a page. What comes from documents, models and packs reaches a page as text nodes and attributes, never as
// markup.

/**
 * An element. A string among the children becomes a text node; a function is a listener; undefined or false is left
 * out.
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== undefined && child !== false));
  return node;
}

export const $ = (id) => document.getElementById(id);
