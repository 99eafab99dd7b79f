// Renders the templates of a chart with Go's own template engine, which Helm uses, and those of
// Helm's functions that this chart needs. Input: JSON with Release and Values, then the files.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"
)

func number(value any) int {
	switch found := value.(type) {
	case int:
		return found
	case float64:
		return int(found)
	}
	panic(fmt.Sprintf("%v is no number", value))
}

func text(value any) string {
	if found, is := value.(float64); is {
		return strconv.FormatFloat(found, 'f', -1, 64)
	}
	return fmt.Sprint(value)
}

func main() {
	functions := template.FuncMap{
		"quote": func(value any) string { return strconv.Quote(text(value)) },
		"toJson": func(value any) (string, error) {
			found, err := json.Marshal(value)
			return string(found), err
		},
		"int": number,
		"add": func(a, b any) int { return number(a) + number(b) },
		"div": func(a, b any) int { return number(a) / number(b) },
		"until": func(count int) []int {
			found := make([]int, count)
			for place := range found {
				found[place] = place
			}
			return found
		},
	}
	var given map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
		panic(err)
	}
	for _, path := range os.Args[1:] {
		source, err := os.ReadFile(path)
		if err != nil {
			panic(err)
		}
		page := template.New(filepath.Base(path)).Funcs(functions).Option("missingkey=error")
		var out strings.Builder
		if err := template.Must(page.Parse(string(source))).Execute(&out, given); err != nil {
			panic(err)
		}
		fmt.Printf("---\n%s\n", out.String())
	}
}
