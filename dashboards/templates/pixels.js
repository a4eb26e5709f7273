// Drawing of many rectangles: into the pixels of a canvas, which is tens of times as fast as its own functions, and
// without the blur of edges between pixels.

// A color as the number that a pixel of ImageData has on a little-endian machine.
function pixelOf(color, alpha = 255) {
  const value = Number.parseInt(color.slice(1, 7), 16);
  return ((alpha << 24) | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

// A mixture of two colors, as #rrggbb; `share` is that of the first.
function mixColors(first, second, share) {
  const parts = (color) => [1, 3, 5].map((at) => Number.parseInt(color.slice(at, at + 2), 16));
  const others = parts(second);
  return `#${parts(first).map((value, i) => Math.round(value * share + others[i] * (1 - share)).toString(16).padStart(2, "0")).join("")}`;
}

function createPixels(width, height) {
  const image = new ImageData(Math.max(1, width), Math.max(1, height)), words = new Uint32Array(image.data.buffer);
  return {
    image, width: image.width, height: image.height,
    // Fills whole pixels from x0, y0 to x1, y1 (exclusive); what is outside the image is left out.
    fill(x0, y0, x1, y1, pixel) {
      const left = Math.max(0, x0), right = Math.min(image.width, x1), bottom = Math.min(image.height, y1);
      if (right <= left) return;
      for (let y = Math.max(0, y0), at = y * image.width; y < bottom; y++, at += image.width) {
        if (right - left > 16) words.fill(pixel, at + left, at + right);
        else for (let place = at + left; place < at + right; place++) words[place] = pixel; // a call takes longer than this
      }
    },
  };
}

// A canvas of the size of its element in pixels of the screen; returns its pen, scaled to CSS pixels, and its pixels.
function prepareTrack(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  const size = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const pen = canvas.getContext("2d");
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return { pen, ratio, width, height };
}

// Text that is cut to a width and unreadably narrow text that is left out.
function fillTextWithin(pen, text, x, y, width) {
  if (width < 24) return;
  let shown = text;
  if (pen.measureText(text).width > width) {
    let low = 0, high = text.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (pen.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle; else high = middle - 1;
    }
    if (low < 2) return;
    shown = `${text.slice(0, low)}…`;
  }
  pen.fillText(shown, x, y);
}
