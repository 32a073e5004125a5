// @ts-check
// The OpenAPI document as elements: its introduction, and each procedure and stream with its fields and errors.
import { html } from './lib.js'
import { Inline, Markdown, Scroll } from './reference_markdown.js'

const short = path => path.replace(/^\/api\/(rpc|events)\//, '')

/** A union, its parts apart from each other. */
const union = parts => parts.join(' | ')

/** The page of a document. */
export function Reference({ document }) {
  const { info, tags, paths, servers, components } = document
  const operations = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })),
  )
  const groups = tags.map(tag => ({
    ...tag,
    all: operations.filter(({ operation }) => operation.tags.includes(tag.name)),
  }))
  const server = servers[0].url.replace(/\/$/, '')
  return html`
    <nav aria-label="Contents">
      <h1>${info.title} <small>${info.version}</small></h1>
      <input type="search" placeholder="Search, fields too ( / )" aria-label="Search" />
      <details open><summary>Contents</summary>
        <ul><li><a href="/">Dashboard</a></li><li><a href="#introduction">Introduction</a></li>
          <li><a href="openapi.json">openapi.json</a></li></ul>
        ${groups.map(
          ({ name, all }) =>
            html`<div data-group><h2>${name}</h2><ul>${all.map(
              ({ path, operation }) => html`<li><a href=${`#${operation.operationId}`}>${short(path)}</a></li>`,
            )}</ul></div>`,
        )}
      </details>
    </nav>
    <main>
      <section class="introduction" id="introduction"><h1>${info.summary}</h1><${Markdown} text=${info.description} /></section>
      ${groups.map(
        ({
          name,
          description,
          all,
        }) => html`<section data-group><h2>${name}</h2><p><${Inline} text=${description} /></p>
          ${all.map(one => html`<${Operation} ...${one} server=${server} components=${components} />`)}</section>`,
      )}
    </main>`
}

function Operation({ path, method, operation, server, components }) {
  const { operationId, summary, description, security, requestBody, responses } = operation
  const answer = responses['200'].content['application/json']
  const needs = security?.some(each => !Object.keys(each).length) ? 'may need' : 'needs'
  return html`<article class="panel" id=${operationId}>
    <h3><span class="method ${method}">${method.toUpperCase()}</span> <a href=${`#${operationId}`}>${path}</a></h3>
    <p><${Inline} text=${summary} /></p>
    <${Markdown} text=${description ?? ''} />
    ${security && html`<p class="note">Changes something: ${needs} <code>Authorization: Bearer …</code>.</p>`}
    ${requestBody && html`<${Input} path=${path} operation=${operation} server=${server} components=${components} />`}
    ${
      operation['x-event-data'] &&
      html`<h4>Data of an event</h4><${Body} schema=${operation['x-event-data']} components=${components} />`
    }
    ${answer && html`<h4>Answer</h4><${Body} schema=${answer.schema} components=${components} />`}
    <${Errors} responses=${responses} shared=${components.responses} />
  </article>`
}

function Input({ path, operation, server, components }) {
  const { schema, example = {} } = operation.requestBody.content['application/json']
  const text = JSON.stringify(example)
  const changes = Boolean(operation.security)
  return html`<h4>Input</h4><${Body} schema=${schema} components=${components} />
    <pre><code>curl -s ${server}${path} -d '${text}'</code></pre>
    <p class="note">With the oRPC client: <code>${operation['x-orpc-path']}</code></p>
    <details class="try" data-path=${path}><summary>Try it</summary><div>
      <textarea aria-label=${`Input of ${path}`} spellcheck="false">${text}</textarea>
      ${changes && html`<input type="text" autocomplete="off" placeholder="API_TOKEN, if one is set" aria-label="API_TOKEN" />`}
      <button class="button" type="button">${changes ? 'Send; this changes something' : 'Send'}</button><pre hidden></pre>
    </div></details>`
}

function Errors({ responses, shared }) {
  const others = Object.entries(responses).filter(([status]) => status !== '200')
  if (!others.length) return null
  const rows = others.map(([status, { $ref, description }]) => {
    const code = $ref && nameOf($ref)
    return html`<tr><td>${status}</td><td>${code && html`<code>${code}</code>`}</td>
      <td><${Inline} text=${description ?? shared[code].description} /></td></tr>`
  })
  return html`<h4>Errors</h4><${Scroll}><thead><tr><th>status</th><th>code</th><th>meaning</th></tr></thead>
    <tbody>${rows}</tbody></${Scroll}>`
}

const nameOf = reference => reference.split('/').at(-1)
const resolved = (schema, components) => (schema.$ref ? components.schemas[nameOf(schema.$ref)] : schema)

/** A schema in full: its description and its fields. */
function Body({ schema: given, components }) {
  const schema = resolved(given, components)
  if (schema.type === 'array')
    return html`<p class="note">A list, each:</p><${Body} schema=${schema.items} components=${components} />`
  if (schema.anyOf)
    return schema.anyOf.map(option => html`<${Kind} schema=${resolved(option, components)} components=${components} />`)
  return html`<${Markdown} text=${schema.description ?? ''} />${
    hasFields(schema)
      ? html`<${Fields} schema=${schema} components=${components} />`
      : schema.additionalProperties === false
        ? html`<p class="note">No fields.</p>`
        : html`<p class="type">${typeOf(schema, components)}</p>`
  }`
}

/** One of several schemas that differ in `type`. */
const Kind = ({ schema, components }) => html`<details>
  <summary><code>${schema.properties.type.enum[0]}</code> <${Inline} text=${schema.description ?? ''} /></summary>
  <${Fields} schema=${schema} components=${components} /></details>`

const hasFields = schema => Object.keys(schema.properties ?? {}).length > 0

const Fields = ({ schema: { properties, required = [] }, components }) =>
  html`<${Scroll}><tbody>${Object.entries(properties).map(
    ([name, field]) => html`<tr><td class=${required.includes(name) ? 'name' : 'name optional'}>${name}</td>
    <td><${Field} field=${field} components=${components} /></td></tr>`,
  )}</tbody></${Scroll}>`

function Field({ field, components }) {
  const told = limitsOf(field)
  const hasLimits = told && (field.description ?? 'Default: ').startsWith('Default: ')
  return html`<span class="type">${typeOf(field, components)}</span> ${
    field.description && html`<${Inline} text=${field.description} />`
  }${hasLimits && (field.description ? `; ${told}` : told)}${objectsIn(field, components)
    .filter(hasFields)
    .map(
      inner => html`<details><summary>Fields of ${inner.title}</summary>
        ${inner.description && html`<p class="note"><${Inline} text=${inner.description} /></p>`}
        <${Fields} schema=${inner} components=${components} /></details>`,
    )}`
}

/** The objects that a field may hold, at any depth of lists and alternatives. */
function objectsIn(field, components) {
  const schema = resolved(field, components)
  const values = schema.type === 'object' ? schema.additionalProperties : null
  return [
    ...(values && typeof values === 'object' ? objectsIn(values, components) : []),
    ...(schema.type === 'object' ? [schema] : []),
    ...[...(schema.anyOf ?? []), ...(schema.items ? [schema.items] : [])].flatMap(inner =>
      objectsIn(inner, components),
    ),
  ]
}

/** A short description of a type. */
function typeOf(field, components) {
  const schema = resolved(field, components)
  if (schema.enum) return union(schema.enum.map(value => JSON.stringify(value)))
  if (schema.anyOf && !schema.type) return union(schema.anyOf.map(option => typeOf(option, components)))
  return union([schema.type ?? 'anything'].flat().map(kind => kindOf(kind, schema, components)))
}

function kindOf(kind, schema, components) {
  if (kind === 'array') return `list of ${typeOf(schema.items, components)}`
  if (kind === 'object') {
    const values = schema.additionalProperties
    return values && typeof values === 'object' ? `names to ${typeOf(values, components)}` : (schema.title ?? 'object')
  }
  if (kind === 'string')
    return schema.format === 'date-time' ? 'time' : schema.pattern?.startsWith('^-?(0|') ? 'decimal text' : 'text'
  return { integer: 'whole number', boolean: 'true | false' }[kind] ?? kind
}

const LIMITS = {
  exclusiveMinimum: limit => `above ${limit}`,
  minimum: limit => `from ${limit}`,
  maximum: limit => `up to ${limit}`,
  minLength: limit => `at least ${limit} characters`,
  maxLength: limit => `at most ${limit} characters`,
  maxItems: limit => `at most ${limit} entries`,
}

const limitsOf = field =>
  Object.entries(LIMITS)
    .filter(([key]) => key in field)
    .map(([key, words]) => words(field[key]))
    .join(', ')
