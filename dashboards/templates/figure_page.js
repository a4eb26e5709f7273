// A page of figures and tables.
startPage(drawFigure)();
